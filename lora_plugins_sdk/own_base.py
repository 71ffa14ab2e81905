"""Whole base weights in an adapter file: PEFT saves embedding and head along with an adapter that touches them.

They mean nothing while they are the base's own; anything else would be dropped, and is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lora_plugins_sdk.agreement import from_all_ranks
from lora_plugins_sdk.base_weights import base_layout, base_sources, local_parameters, local_value
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.peft_config import doubled_wholes, whole_weights

if TYPE_CHECKING:
    from lora_plugins_sdk.adapter import LoraAdapter

_CURE = "save the adapter without it (PEFT: save_embedding_layers=False) if it was not trained"


def other_than_the_base(adapter: LoraAdapter, tensors: Mapping[str, torch.Tensor]) -> Iterator[Diagnostic]:
    """Whole weights that are not the base's own. Each rank compares what it holds; all hear of every difference.

    Collective over all ranks when there are whole weights, and nothing otherwise.

    Args:
        adapter: the attached adapter, whose model holds the base.
        tensors: all tensors of the adapter file, the same on every rank.
    """
    names = whole_weights(tensors)
    if not names:
        return
    yield from doubled_wholes(tensors)
    given = _Given({hf: tensors[name] for name, hf in names.items()})
    said = {
        hf: why for verdicts in from_all_ranks(_compare(adapter, given), adapter.run) for hf, why in verdicts.items()
    }
    for name, hf in sorted(names.items()):
        reason = said.get(hf, "is no weight of the base by itself")
        if reason:
            yield Diagnostic(subject=name, reason=reason, cure=_CURE)


class _Given:
    """Tensors in memory, read like those of a directory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name][start:stop]

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name][:, start:stop]

    def part(self, name: str, *index: int | slice) -> torch.Tensor:
        return self.tensors[name][index]


def _compare(adapter: LoraAdapter, given: _Given) -> dict[str, str]:
    """HF name -> why it is not this rank's part of the base, empty when it is; only of what this rank holds."""
    plugin, run = adapter.plugin, adapter.run
    files = plugin.base_tensors(adapter.hf_config, given)
    dims = plugin.architecture.dims(adapter.hf_config)
    declared = plugin.base_weights(adapter.hf_config)
    parameters: dict[str, Any] = local_parameters(adapter.chunks, declared)
    verdicts: dict[str, str] = {}
    for source in base_sources(declared, dims, plugin.architecture.num_layers):
        if source.host not in parameters or len(source.hf) != 1 or not files.has(source.hf[0]):
            continue
        parameter = parameters[source.host]
        local = local_value(source, base_layout(source, files, dims, run), files, run)
        if local.shape != parameter.shape:
            verdict = f"is of another size than the base's: shape {list(given.shape(source.hf[0]))}"
        else:
            same = torch.equal(local.to(parameter), parameter.detach())
            verdict = "" if same else "is in the adapter as a whole weight, and not as the base has it"
        verdicts[source.hf[0]] = verdicts.get(source.hf[0]) or verdict
    return verdicts
