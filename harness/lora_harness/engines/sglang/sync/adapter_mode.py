"""Adapter mode: the base is loaded once; each version of the policy follows as an adapter of its own name.

A version is checked here, loaded on every engine, asked for on every engine, and only then named by requests. Names
never come back, so neither a cached prefix nor a late request can mix two versions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.sync.engine_group import EngineGroup, failures
from lora_harness.engines.sglang.sync.package import POLICY_PREFIX, AdapterPackage, LoraSettings, Packer, policy_name
from lora_harness.engines.sglang.sync.serving import Serving
from lora_harness.engines.sglang.sync.transport import AdapterTransport
from lora_harness.engines.sglang.sync.versions import Versions
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any

if TYPE_CHECKING:
    from torch import Tensor

DRAIN_SECONDS = 600.0


class AdapterSync:
    """A `PolicySync` by adapters.

    Args:
        group: the engines.
        packer: checks and translates.
        lora: what the engines were started with.
        transport: carries the packages.
        keep: most versions loaded at the same time.

    Raises:
        LoraError: an engine holds a policy of another run, or has no slots for `keep` versions beside the base.
    """

    def __init__(
        self, group: EngineGroup, packer: Packer, lora: LoraSettings, transport: AdapterTransport, *, keep: int = 2
    ) -> None:
        if keep + 1 > lora.slots:
            raise LoraError(
                f"max_loras_per_batch={lora.slots}",
                reason=f"{keep} versions and the base can be in one batch",
                cure=f"start the engines with {keep + 1} or more",
            )
        self._group = group
        self._packer = packer
        self._transport = transport
        self._versions = Versions(keep)
        self._packages: dict[int, AdapterPackage] = {}
        # One publish at a time, and one that changes engines, in this order. `recover` takes the second alone: the
        # publish may be waiting for the very request that needs it.
        self._publishing, self._engines = threading.Lock(), threading.Lock()
        raise_if_any("these engines cannot serve a new run:", _foreign(group))

    def publish(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """See `PolicySync.publish`."""
        package = self._packer.pack(version, tensors, config)
        self._transport.check(package)
        with self._publishing:
            self._versions.claim(version)
            self._versions.wait_for_room(DRAIN_SECONDS)
            with self._engines:
                self._retire()
                self._transport.prepare(package)
                sent = self._stage(package)
                self._packages[version] = package
                self._versions.flip(version)
                self._retire()
        return sent

    @contextmanager
    def serving(self) -> Iterator[Serving]:
        """See `PolicySync.serving`."""
        with self._versions.lease() as version:
            yield Serving(version=version, adapter=policy_name(version) if version else None)

    def recover(self, index: int) -> None:
        """See `PolicySync.recover`."""
        with self._engines:
            self._bring_back(index)

    def close(self) -> None:
        """See `PolicySync.close`."""
        with self._publishing, self._engines:
            for package in self._packages.values():
                self._withdraw(package)
            self._packages.clear()
        self._transport.close()

    def _stage(self, package: AdapterPackage) -> int:
        """Load a package on every engine; on all, or an error and on none. An engine that died is started anew."""
        group, sent = self._group, package.num_bytes * len(self._group.clients)
        failed = failures(group.each(lambda client: self._load(client, package)))
        for index, cause in failed.items():
            name = group.clients[index].name
            group.say(f"engine {name} did not take {package.name}: {cause}")
            try:
                if group.clients[index].healthy():
                    raise cause
                sent += self._bring_back(index)
                self._load(group.clients[index], package)
                sent += package.num_bytes
            except LoraError as error:
                self._withdraw(package)
                back = "" if error is cause else f" and could not be brought back: {error}"
                raise LoraError(
                    f"engine {name}",
                    reason=f"did not take {package.name} ({cause}){back}\n"
                    f"Requests get {_shown(self._versions.current)} as before",
                    cure="correct what the engine names and resume the run",
                ) from error
        return sent

    def _load(self, client: SglangClient, package: AdapterPackage) -> None:
        self._transport.load(client, package)
        if package.name not in client.loaded_adapters():
            raise LoraError(
                f"engine {client.name}", reason=f"accepted {package.name} and does not list it", cure="restart it"
            )

    def _bring_back(self, index: int) -> int:
        """Start an engine anew and load every version that requests may still name; returns the bytes sent."""
        self._group.restart(index)
        sent = 0
        for version in self._versions.loaded:
            self._load(self._group.clients[index], self._packages[version])
            sent += self._packages[version].num_bytes
        return sent

    def _withdraw(self, package: AdapterPackage) -> None:
        """Take a package from whichever engines hold it; one that is gone holds nothing."""

        def take_back(client: SglangClient) -> None:
            if package.name in client.loaded_adapters():
                client.unload_adapter(package.name)

        failures(self._group.each(take_back))
        self._transport.release(package)

    def _retire(self) -> None:
        """Unload what no request can name any more. An engine that fails here is found out by its next call."""
        for version in self._versions.superseded():
            self._versions.forget(version)
            package = self._packages.pop(version)
            left = failures(self._group.each(lambda client, name=package.name: client.unload_adapter(name)))
            for index, error in left.items():
                self._group.say(f"engine {self._group.clients[index].name} could not unload {package.name}: {error}")
            self._transport.release(package)


def _foreign(group: EngineGroup) -> Iterator[Diagnostic]:
    for index, held in group.each(lambda client: client.loaded_adapters()).items():
        name = group.clients[index].name
        if isinstance(held, LoraError):
            yield from held.diagnostics
        elif left := sorted(one for one in held if one.startswith(POLICY_PREFIX)):
            yield Diagnostic(
                subject=f"engine {name}",
                reason=f"holds {', '.join(left)} of another run, or of one that was killed",
                cure="restart the engine, or give each run its own",
            )


def _shown(version: int) -> str:
    return policy_name(version) if version else "the base"
