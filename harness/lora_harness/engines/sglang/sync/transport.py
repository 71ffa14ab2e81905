"""The two ways in which an adapter reaches an engine: in the request's memory, or as a directory that both can read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.sync.package import POLICY_PREFIX, AdapterPackage, sha256
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_files import PeftAdapter, read_adapter, write_adapter
from lora_plugins_sdk.staging import exclusive, remove, staged_directory, writable

MIB = 2**20


class AdapterTransport(Protocol):
    """Carries packages to engines."""

    def check(self, package: AdapterPackage) -> None:
        """Raise a `LoraError` when this package cannot travel this way. Sends nothing."""
        ...

    def prepare(self, package: AdapterPackage) -> None:
        """What is done once for all engines."""
        ...

    def load(self, client: SglangClient, package: AdapterPackage) -> None:
        """Load a prepared package into one engine."""
        ...

    def release(self, package: AdapterPackage) -> None:
        """No engine will ask for this package again."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class MemoryTransport:
    """Tensors in the request itself, with checksums that the engine compares.

    Args:
        buffer_mib: largest request in MiB; SGLang takes an adapter in one.
    """

    def __init__(self, buffer_mib: int) -> None:
        self._buffer_mib = buffer_mib

    def check(self, package: AdapterPackage) -> None:
        """See `AdapterTransport.check`."""
        needed = -(-package.num_bytes // MIB)
        if needed > self._buffer_mib:
            raise LoraError(
                f"adapter of {needed} MiB",
                reason=f"SGLang takes an adapter in one request, and one is {self._buffer_mib} MiB at most",
                cure=f"set sync_buffer_mib to {needed} or more, or send adapters through a directory",
            )

    def prepare(self, package: AdapterPackage) -> None:
        """See `AdapterTransport.prepare`."""

    def load(self, client: SglangClient, package: AdapterPackage) -> None:
        """See `AdapterTransport.load`."""
        client.load_adapter(package.name, package.tensors, package.config, package.checksums)

    def release(self, package: AdapterPackage) -> None:
        """See `AdapterTransport.release`."""

    def close(self) -> None:
        """See `AdapterTransport.close`."""


class DirectoryTransport:
    """PEFT directories on a file system that the engines share with the trainer, for example a tmpfs.

    A directory appears whole, by one rename, after its tensors were read back and compared.

    Args:
        root: where the directories go, made when it is not there. This process owns it until `close`; what a killed
            one left is removed.

    Raises:
        LoraError: another process owns it, or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._owned = ExitStack()
        with writable(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            self._owned.enter_context(exclusive(self._root / ".lock", self._root))
        for left in self._root.glob(f"*{POLICY_PREFIX}*"):
            remove(left)

    def check(self, package: AdapterPackage) -> None:
        """See `AdapterTransport.check`."""

    def prepare(self, package: AdapterPackage) -> None:
        """See `AdapterTransport.prepare`."""
        with staged_directory(self._root / package.name) as place:
            write_adapter(PeftAdapter(tensors=package.tensors, config=package.config), place)
            found = {name: sha256(one) for name, one in read_adapter(place).tensors.items()}
            if found != package.checksums:
                raise LoraError(
                    str(self._root),
                    reason=f"gave other tensors back than were written for {package.name}",
                    cure="check the disk, or send adapters in memory",
                )

    def load(self, client: SglangClient, package: AdapterPackage) -> None:
        """See `AdapterTransport.load`."""
        client.load_adapter_directory(package.name, self._root / package.name)

    def release(self, package: AdapterPackage) -> None:
        """See `AdapterTransport.release`."""
        remove(self._root / package.name)

    def close(self) -> None:
        """See `AdapterTransport.close`."""
        for left in self._root.glob(f"*{POLICY_PREFIX}*"):
            remove(left)
        self._owned.close()
