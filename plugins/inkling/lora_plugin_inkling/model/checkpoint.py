"""A checkpoint of Inkling as the architecture declares it, whatever its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_plugin_inkling.architecture import ARCHITECTURE
from lora_plugin_inkling.model.published import MODEL, PREFIX, pairing_of
from lora_plugins_sdk import BaseTensors

_HEAD = "lm_head.weight"


def declared_tensors(stored: BaseTensors, hf_config: Mapping[str, object]) -> BaseTensors:
    """The view of a checkpoint in transformers' or the published layout, its head with a row for each token.

    Args:
        stored: the tensors of its files.
        hf_config: its config.
    """
    assert ARCHITECTURE.multimodal is not None
    if any(name.startswith(PREFIX) for name in stored.names()):
        stored = _FromPublished(stored, ARCHITECTURE.multimodal.prefix_in(hf_config))
    return _Trimmed(stored, ARCHITECTURE.dims(hf_config).resolve(ARCHITECTURE.vocabulary))


class _View:
    """Tensors read whole or by rows and columns through `part`."""

    def has(self, name: str) -> bool:
        return name in self.names()

    def names(self) -> set[str]:
        raise NotImplementedError

    def part(self, name: str, *index: int | slice) -> Tensor:
        raise NotImplementedError

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.part(name, slice(start, stop))

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        return self.part(name, slice(None), slice(start, stop))


class _FromPublished(_View):
    """Published tensors as transformers names and arranges them; reads no more rows than are asked for."""

    def __init__(self, stored: BaseTensors, prefix: str) -> None:
        self.stored = stored
        self.sources: dict[str, _Source] = {}
        for name in stored.names():
            found = pairing_of(name)
            if found is None:
                self.sources[name] = _Source(name=name)
                continue
            pairing, layer = found
            for half, hf in enumerate(pairing.hf):
                target = prefix + hf.format(layer=layer).removeprefix(MODEL) if hf.startswith(MODEL) else hf
                alone = half if len(pairing.hf) > 1 else None
                self.sources[target] = _Source(name=name, alternating=pairing.alternating, half=alone)

    def names(self) -> set[str]:
        return set(self.sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self.sources[name]
        shape = list(self.stored.shape(source.name))
        if source.half is not None and source.alternating is not None:
            shape[source.alternating] //= 2
        return tuple(shape)

    def part(self, name: str, *index: int | slice) -> Tensor:
        source, dim = self.sources[name], self.sources[name].alternating
        if dim is None:
            return self.stored.part(source.name, *index)
        index += (slice(None),) * (dim + 1 - len(index))
        count = self.stored.shape(source.name)[dim] // 2
        wanted = index[dim]
        assert isinstance(wanted, slice), "rows are read in ranges"
        start, stop, _ = wanted.indices(self.shape(name)[dim])
        if source.half is not None:
            start, stop = start + source.half * count, stop + source.half * count
        pieces = []
        for half in range(2):
            first, last = (min(max(row, half * count), (half + 1) * count) - half * count for row in (start, stop))
            if first < last:
                both = self.stored.part(source.name, *index[:dim], slice(2 * first, 2 * last), *index[dim + 1 :])
                axis = dim - sum(isinstance(one, int) for one in index[:dim])
                pieces.append(both.unflatten(axis, (-1, 2)).select(axis + 1, half))
        return torch.cat(pieces, dim=dim - sum(isinstance(one, int) for one in index[:dim]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """The stored tensor that another one is read from; `half` is gate (0) or up (1) of it, None for both."""

    name: str
    alternating: int | None = None
    half: int | None = None


class _Trimmed(_View):
    """The head without HF's padding rows."""

    def __init__(self, stored: BaseTensors, vocabulary: int) -> None:
        self.stored, self.vocabulary = stored, vocabulary

    def names(self) -> set[str]:
        return self.stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *rest = self.stored.shape(name) or (0,)
        return (min(rows, self.vocabulary), *rest) if name == _HEAD else self.stored.shape(name)

    def part(self, name: str, *index: int | slice) -> Tensor:
        if name != _HEAD:
            return self.stored.part(name, *index)
        rows, *rest = index or (slice(None),)
        assert isinstance(rows, slice), "rows are read in ranges"
        start, stop, _ = rows.indices(self.shape(name)[0])
        return self.stored.part(name, slice(start, stop), *rest)
