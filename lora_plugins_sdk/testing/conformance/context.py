"""What the checks of one subject share: worlds, and what was observed in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lora_plugins_sdk.testing.conformance.around import entered, find_factory
from lora_plugins_sdk.testing.conformance.repeats import Repeats
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout
from lora_plugins_sdk.testing.world import run_world

WORLD_SECONDS = 120.0


class Context:
    """One subject under test.

    Args:
        subject: what is tested.
        around: `package.module:factory` of a context manager that is entered around everything that is measured, in
            every process that measures (a seeded fault); None for nothing.
        world_seconds: what a world of ranks may take before it is ended with every rank's stack.
        snapshot: file with the accepted parameter table; None when there is none to compare with.
        update_snapshot: write that file.
        how_to_update: what a user does to have it written, for messages.

    Raises:
        LoraError: `around` names nothing.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        around: str | None = None,
        world_seconds: float = WORLD_SECONDS,
        snapshot: Path | None = None,
        update_snapshot: bool = False,
        how_to_update: str = "",
    ) -> None:
        if around is not None:
            find_factory(around)  # in a rank, a name that leads nowhere would look like a fault that was found
        self.subject = subject
        self.around = around
        self.world_seconds = world_seconds
        self.snapshot = snapshot
        self.update_snapshot = update_snapshot
        self.how_to_update = how_to_update
        self.sites: set[str] = set()
        self.repeats = Repeats()
        self._kept: dict[object, Any] = {}

    def exercised(self, sites: Iterable[str]) -> None:
        """Record host modules whose values the running check measured."""
        self.sites.update(sites)

    def keep(self, key: object, make: Callable[[], Any]) -> Any:
        """The value of `make()`, or what it raised, made once."""
        if key not in self._kept:
            try:
                self._kept[key] = partial(_give, make())
            except Exception as error:
                self._kept[key] = partial(_raise, error)
        return self._kept[key]()

    def world(self, function: Callable[..., Any], layout: Layout, *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank of a layout, within `around`; the ranks' values in rank order.

        Raises:
            WorldError: a rank raised, died or hung; it shows every rank's stack.
        """
        return run_world(in_rank, layout, self.around, function, arguments, timeout=self.world_seconds)


def _give(value: Any) -> Any:
    return value


def _raise(error: Exception) -> Any:
    raise error.with_traceback(None)


def in_rank(around: str | None, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """In a measuring process: `function(*arguments)` within `around`."""
    with entered(around):
        return function(*arguments)
