"""Merge mode: each version of the policy is folded into the pristine base and replaces the engines' weights.

Only weights that an adapter touches are sent: the engines hold the base's own values everywhere else, which is checked
before the first version and after every one. SGLang reports success for names that it does not know, so the checksums
of all its weights are compared with those of the merged model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.sync.buckets import buckets
from lora_harness.engines.sglang.sync.checksums import Checksum, checksum_that_gives, on_cpu
from lora_harness.engines.sglang.sync.engine_group import EngineGroup, failures
from lora_harness.engines.sglang.sync.engine_weights import EngineWeight, differences, engine_weights
from lora_harness.engines.sglang.sync.fold import MIB, FoldedVersion, Folder
from lora_harness.engines.sglang.sync.package import policy_name
from lora_harness.engines.sglang.sync.serving import Serving
from lora_harness.engines.sglang.sync.versions import Versions
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor

DRAIN_SECONDS = 600.0
_SHOWN = 5


class MergeSync:
    """A `PolicySync` by merged weights. Engines serve nothing while their weights change.

    Args:
        group: the engines; each serves the base of `folder` without LoRA.
        folder: folds versions into the base.
        dtype: the engines' dtype of weights.
        buffer_mib: largest bucket in MiB.

    Raises:
        LoraError: an engine does not hold the base's own weights, or holds them in a layout that is not known here.
    """

    def __init__(self, group: EngineGroup, folder: Folder, *, dtype: torch.dtype, buffer_mib: int) -> None:
        self._group = group
        self._folder = folder
        self._dtype = dtype
        self._limit = buffer_mib * MIB
        self._versions = Versions(keep=2)
        # One publish at a time, and one that changes engines, in this order. `recover` takes the second alone: the
        # publish may be waiting for the very request that needs it.
        self._publishing, self._engines = threading.Lock(), threading.Lock()
        self._weights = engine_weights(folder.base, folder.hf_config)
        self._held_in: dict[str, list[str]] = {}
        for name, weight in self._weights.items():
            for part in weight.parts:
                self._held_in.setdefault(part, []).append(name)
        self._now = folder.pristine()
        self._checksum = self._find_checksum()
        self._pristine: dict[str, str] = {}
        for _ in self._stream(self._now, self._weights, (), self._pristine):
            pass
        for error in failures(group.each(self._verify)).values():
            raise error

    def publish(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """See `PolicySync.publish`."""
        folded = self._folder.fold(version, tensors, config)
        with self._publishing:
            self._versions.claim(version)
            with self._versions.exclusively(DRAIN_SECONDS), self._engines:
                sent = self._replace(folded)
                self._versions.flip(version)
            for old in self._versions.superseded():
                self._versions.forget(old)
        return sent

    @contextmanager
    def serving(self) -> Iterator[Serving]:
        """See `PolicySync.serving`."""
        with self._versions.lease() as version:
            yield Serving(version=version, weight_version=policy_name(version) if version else None)

    def recover(self, index: int) -> None:
        """See `PolicySync.recover`."""
        with self._engines:
            self._bring_back(index, self._now)

    def close(self) -> None:
        """See `PolicySync.close`. Engines that stop with this run keep what they have."""
        if not self._group.ours:
            self.restore_base()

    def restore_base(self) -> None:
        """Give the engines the base's own weights back, as far as they answer."""
        with self._publishing, self._versions.exclusively(DRAIN_SECONDS), self._engines:
            pristine = self._folder.pristine()
            _, failed = self._push(pristine, self._now.folds.keys(), range(len(self._group.clients)))
            for index, error in failed.items():
                self._group.say(f"engine {self._group.clients[index].name} could not go back to the base: {error}")
            self._now = pristine

    def _replace(self, folded: FoldedVersion) -> int:
        """Put a version on every engine, or what they had before on every engine and an error."""
        everyone = range(len(self._group.clients))
        names = folded.folds.keys() | self._now.folds.keys()
        sent, failed = self._push(folded, names, everyone)
        for index, cause in failed.items():
            name = self._group.clients[index].name
            self._group.say(f"engine {name} did not take {_shown(folded)}: {cause}")
            try:
                sent += self._bring_back(index, folded)
            except LoraError as error:
                self._go_back(names, changed=[one for one in everyone if one not in failed], lost=list(failed))
                raise LoraError(
                    f"engine {name}",
                    reason=f"did not take {_shown(folded)} ({cause}) and could not be brought back: {error}\n"
                    f"Requests get {_shown(self._now)} as before",
                    cure="correct what the engine names and resume the run",
                ) from error
        self._now = folded
        return sent

    def _go_back(self, names: Collection[str], changed: list[int], lost: list[int]) -> None:
        _, failed = self._push(self._now, names, changed)
        for index in [*failed, *lost]:
            try:
                self._bring_back(index, self._now)
            except LoraError as error:
                name = self._group.clients[index].name
                self._group.say(f"engine {name} could not go back to {_shown(self._now)}: {error}")

    def _bring_back(self, index: int, folded: FoldedVersion) -> int:
        """Start an engine anew and give it a version; returns the bytes sent."""
        self._group.restart(index)
        sent, failed = self._push(folded, folded.folds.keys(), [index])
        for error in failed.values():
            raise error
        return sent

    def _push(
        self, folded: FoldedVersion, names: Collection[str], indices: Iterable[int]
    ) -> tuple[int, dict[int, LoraError]]:
        """Send some tensors of a version and check all weights; returns the bytes sent and the engines that failed.

        An engine that fails on the way serves nothing: its update stays open.
        """
        live, failed, sent = set(indices), dict[int, LoraError](), 0

        def ask(work: Callable[[SglangClient], None]) -> None:
            errors = failures(self._group.each(work, sorted(live)))
            failed.update(errors)
            live.difference_update(errors)

        expected = dict(self._pristine)
        touched = {held for name in names for held in self._held_in[name]}
        weights = {name: weight for name, weight in self._weights.items() if name in touched}
        if weights:
            ask(lambda client: client.begin_weight_update())
            try:
                for bucket in buckets(self._stream(folded, weights, names, expected), self._limit):
                    sent += len(live) * sum(one.numel() * one.element_size() for one in bucket.values())
                    ask(lambda client, bucket=bucket: client.update_weights(bucket))
            except LoraError as error:
                failed |= dict.fromkeys(live, error)
                live.clear()
            ask(lambda client: client.end_weight_update(policy_name(folded.version)))
        ask(lambda client: self._verify(client, expected))
        return sent, failed

    def _stream(
        self,
        folded: FoldedVersion,
        weights: Mapping[str, EngineWeight],
        names: Collection[str],
        checksums: dict[str, str],
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors among `names` of a version, each once; the checksums of `weights` are entered on the way."""
        left = set(names)
        for name, weight in weights.items():
            sending: list[tuple[str, Tensor]] = []

            def parts(weight: EngineWeight = weight, sending: list[tuple[str, Tensor]] = sending) -> Iterator[Tensor]:
                for part in weight.parts:
                    tensor = folded.read(part)
                    if part in left:
                        left.remove(part)
                        sending.append((part, tensor))
                    yield tensor

            checksums[name] = self._checksum(weight.whole(parts(), self._dtype))
            yield from sending

    def _find_checksum(self) -> Checksum:
        """How these engines compute checksums, found by the smallest of their weights."""
        base = self._folder.base
        smallest = min(self._weights.values(), key=lambda one: sum(base.tensor(part).num_bytes for part in one.parts))
        tensor = smallest.whole(map(self._now.read, smallest.parts), self._dtype)
        reported = self._group.clients[0].weight_checksums().get(smallest.name)
        # With neither, the comparison of all weights tells what is wrong.
        return checksum_that_gives(reported, tensor) or on_cpu

    def _verify(self, client: SglangClient, expected: Mapping[str, str] | None = None) -> None:
        """Compare all of an engine's weights with what they must be."""
        wrong = differences(self._pristine if expected is None else expected, client.weight_checksums())
        if wrong:
            names = ", ".join(wrong[:_SHOWN]) + (", ..." if len(wrong) > _SHOWN else "")
            raise LoraError(
                f"engine {client.name}",
                reason=f"{len(wrong)} of its weights are not what they must be: {names}",
                cure="let no one else update the engine, and let it serve this base with the dtype of model.dtype, "
                "unquantised, on one rank; a model whose weights SGLang packs otherwise needs adapter mode",
            )


def _shown(folded: FoldedVersion) -> str:
    return policy_name(folded.version) if folded.version else "the base"
