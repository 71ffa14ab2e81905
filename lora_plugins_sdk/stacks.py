"""Projections whose HF weight is one parameter `[n, out, in]` of n weights, which the host has side by side as one.

In a COLUMN site they lie along the output, in a ROW site along the input. The adapter's factor on that side is then
every weight's own and the other one is shared by all; files have both packed, `[n, ...]` and `[1, ...]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.targets import candidates

if TYPE_CHECKING:
    from torch import Tensor

    from lora_plugins_sdk.architecture import Architecture
    from lora_plugins_sdk.base_tensors import BaseTensors
    from lora_plugins_sdk.table import ParamRow


def to_stack(row: ParamRow, factor: Tensor) -> Tensor:
    """A factor `[rank, in]` or `[out, rank]` as files have it: packed where the row's weights are stacked."""
    if not row.stack:
        return factor
    if row.stack_dim < 0:
        return factor.unsqueeze(0)
    return factor.unflatten(row.stack_dim, (row.stack, -1)).movedim(row.stack_dim, 0).contiguous()


def from_stack(row: ParamRow, packed: Tensor) -> Tensor:
    """The inverse of `to_stack`."""
    if not row.stack:
        return packed
    if row.stack_dim < 0:
        return packed.squeeze(0)
    return packed.movedim(0, row.stack_dim).flatten(row.stack_dim, row.stack_dim + 1)


def side_by_side(stored: BaseTensors, architecture: Architecture, hf_config: Mapping[str, object]) -> BaseTensors:
    """A checkpoint in which each stack is the one weight that the host has, named like any linear's."""
    stacks = {
        f"{one.hf}.weight": Stack(parameter=one.hf, kind=one.site.kind)
        for one in candidates(architecture, hf_config)
        if one.projection.stack is not None and stored.has(one.hf)
    }
    return SideBySide(stored, stacks) if stacks else stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A parameter `[n, out, in]` and the side along which its weights lie in the host."""

    parameter: str
    kind: SiteKind


class SideBySide:
    """Tensors of a checkpoint with stacks as matrices. A stack is read whole; everything else as it is asked for."""

    def __init__(self, stored: BaseTensors, stacks: Mapping[str, Stack]) -> None:
        self.stored, self.stacks = stored, stacks

    def names(self) -> set[str]:
        """Every tensor name."""
        return self.stored.names() - {one.parameter for one in self.stacks.values()} | self.stacks.keys()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.stacks or self.stored.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        if name not in self.stacks:
            return self.stored.shape(name)
        stack = self.stacks[name]
        shape = self.stored.shape(stack.parameter)
        if len(shape) != 3:
            return shape
        count, out, width = shape
        return (count * out, width) if stack.kind is SiteKind.COLUMN else (out, count * width)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a tensor."""
        return self.part(name, slice(start, stop))

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Columns `[start, stop)` of a matrix."""
        return self.part(name, slice(None), slice(start, stop))

    def part(self, name: str, *index: int | slice) -> Tensor:
        """What an index over the leading dimensions selects of a tensor."""
        if name not in self.stacks:
            return self.stored.part(name, *index)
        stack = self.stacks[name]
        whole = self.stored.part(stack.parameter, slice(None))
        flat = whole.flatten(0, 1) if stack.kind is SiteKind.COLUMN else whole.transpose(0, 1).flatten(1)
        return flat[index]
