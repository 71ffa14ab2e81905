"""Which versions of the policy the engines hold, which one answers new requests, and who still uses which."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lora_plugins_sdk.errors import LoraError


class Versions:
    """The versions of one run. Safe to use from several threads.

    Args:
        keep: most versions that are loaded at the same time, 2 or more: one that serves, one that is on its way.

    Attributes:
        current: the version that answers new requests; 0 is the base.
    """

    def __init__(self, keep: int) -> None:
        if keep < 2:
            raise LoraError(
                f"keep={keep}",
                reason="the version that serves and the next one are loaded together",
                cure="use 2 or more",
            )
        self.current = 0
        self._keep = keep
        self._last = 0
        self._loaded: list[int] = []
        self._leases: Counter[int] = Counter()
        self._closed = False
        self._changed = threading.Condition()

    @property
    def loaded(self) -> tuple[int, ...]:
        """Versions that the engines hold, oldest first."""
        with self._changed:
            return tuple(self._loaded)

    @contextmanager
    def lease(self) -> Iterator[int]:
        """The version that serves now; it stays loaded until the block ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            version = self.current
            self._leases[version] += 1
        try:
            yield version
        finally:
            with self._changed:
                self._leases[version] -= 1
                self._changed.notify_all()

    def claim(self, version: int) -> None:
        """Take a version's number, for good: what fails from here on does not free it.

        Raises:
            LoraError: it was taken before, or an earlier one was taken after it.
        """
        with self._changed:
            if version <= self._last:
                raise LoraError(
                    f"policy version {version}",
                    reason=f"version {self._last} was published already, and a name never comes back",
                    cure="count versions up",
                )
            self._last = version

    def superseded(self) -> list[int]:
        """Loaded versions that no request uses and no new one will."""
        with self._changed:
            return [one for one in self._loaded if one != self.current and not self._leases[one]]

    def wait_for_room(self, timeout: float) -> None:
        """Wait until one more version may be loaded once what is superseded has gone.

        Args:
            timeout: seconds.

        Raises:
            LoraError: requests of old versions did not end in time; they go on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_use() < self._keep, timeout):
                busy = ", ".join(f"version {one} by {self._leases[one]}" for one in self._loaded if self._leases[one])
                raise LoraError(
                    "policy versions",
                    reason=f"{len(self._loaded)} are still in use after {timeout:g} s ({busy}), and no more than "
                    f"{self._keep} may be loaded",
                    cure="end the requests of old versions, or keep more versions",
                )

    @contextmanager
    def exclusively(self, timeout: float) -> Iterator[None]:
        """Wait until no request runs, and let none start until the block ends.

        Args:
            timeout: seconds.

        Raises:
            LoraError: requests did not end in time; they go on.
        """
        with self._changed:
            self._closed = True
            unused = self._changed.wait_for(lambda: not any(self._leases.values()), timeout)
            calls = sum(self._leases.values())
        try:
            if not unused:
                raise LoraError(
                    "policy weights",
                    reason=f"{calls} calls still generate after {timeout:g} s with the weights that are to change",
                    cure="end them first",
                )
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()

    def flip(self, version: int) -> None:
        """From now on `version` answers new requests."""
        with self._changed:
            self._loaded.append(version)
            self.current = version

    def forget(self, version: int) -> None:
        """The engines hold it no longer."""
        with self._changed:
            assert version != self.current and not self._leases[version], version
            self._loaded.remove(version)
            self._changed.notify_all()

    def _in_use(self) -> int:
        return sum(1 for one in self._loaded if one == self.current or self._leases[one])
