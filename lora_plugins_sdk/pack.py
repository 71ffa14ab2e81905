"""Packs: how one host weight interleaves the rows of several HF projections.

Every host layout met so far is a sequence of *blocks*; a block is a sequence of *runs*, each of consecutive rows of one
projection.

    query groups         block = one group       [q q q | k | v]  [q q q | k | v] ...
    with output gates    block = one group       [q q q | gate gate gate | k | v] ...
    gate | up            block = one TP shard    [gate | up]      [gate | up] ...

A projection's rows fall into *sections* (usually one), which TP splits each on its own: HF keeps the queries, keys and
values of a linear attention in one weight, one after the other, and every rank has its part of each.

TP splits between blocks, so a rank's share of every section is a contiguous slab of HF rows. Both directions (HF ->
host and host -> HF) are read off this one description.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_plugins_sdk.block_layout import BlockLayout, Run
from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError

SectionRows = Sequence[Sequence[int]]
"""HF rows of each section of each projection."""


class Pack(Protocol):
    """Declares a layout; `resolve` turns it into numbers for one model and TP size."""

    def resolve(self, dims: ModelDims, sections: SectionRows, tp: int, multiple: int = 1) -> BlockLayout:
        """Layout for projections whose sections have these HF row counts.

        Args:
            dims: sizes of the model.
            sections: HF rows of each section of each projection.
            tp: number of ranks that share them.
            multiple: of a padded layout, what each rank's rows are rounded up to a multiple of.

        Raises:
            LoraError: TP does not divide the layout.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Concat:
    """Each TP shard concatenates its own rows of every section (`[gate_shard | up_shard]`); one projection is the
    plain case.

    Args:
        pad: round the rows up to what TP and the run's `make_vocab_size_divisible_by` ask for (vocabulary); padding
            rows are zero and never exported.
    """

    pad: bool = False

    def resolve(self, dims: ModelDims, sections: SectionRows, tp: int, multiple: int = 1) -> BlockLayout:
        for count in (count for projection in sections for count in projection):
            if count % tp and not self.pad:
                raise LoraError(
                    f"tensor parallel size {tp}",
                    reason=f"does not divide a projection of {count} rows",
                    cure=f"use a tensor parallel size that divides {count}",
                )
        multiple = multiple if self.pad else 1
        shares = [[padded_share(count, tp, multiple) for count in projection] for projection in sections]
        return BlockLayout.in_order(blocks=tp, shares=shares, sections=sections)


def pads(pack: Pack | None) -> bool:
    """Whether a pack's rows are a vocabulary, which is padded."""
    return isinstance(pack, Concat) and pack.pad


def padded_share(count: int, ranks: int, multiple: int) -> int:
    """What each of `ranks` holds of `count`: the least multiple of `multiple` with which all of them hold it."""
    return -(-count // (ranks * multiple)) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryGroups:
    """Megatron's fused attention input: per key/value head, its query heads, then the key head, then the value head.

    Args:
        groups: config expression for the number of key/value heads.
        gated_heads: where each query head brings an output gate, config expression for the number of query heads. HF's
            first projection then alternates [query | gate] per head, the host has a group's queries, then their gates.
    """

    groups: str = "num_key_value_heads"
    gated_heads: str | None = None

    def __post_init__(self) -> None:
        check_expression(self.groups)
        if self.gated_heads is not None:
            check_expression(self.gated_heads)

    def resolve(self, dims: ModelDims, sections: SectionRows, tp: int, multiple: int = 1) -> BlockLayout:
        groups = dims.resolve(self.groups)
        if groups % tp:
            raise LoraError(
                f"tensor parallel size {tp}",
                reason=f"does not divide the {groups} key/value heads: a head would be cut or replicated",
                cure=f"use a tensor parallel size that divides {groups}",
            )
        for count in (count for projection in sections for count in projection):
            _refuse_uneven(self.groups, groups, count)
        shares = [[count // groups for count in projection] for projection in sections]
        layout = BlockLayout.in_order(blocks=groups, shares=shares, sections=sections)
        if self.gated_heads is None:
            return layout
        heads, rows = dims.resolve(self.gated_heads), shares[0][0]
        _refuse_uneven(self.groups, groups, heads, of="query heads")
        _refuse_uneven(f"2 * {self.gated_heads}", 2 * heads, sections[0][0])
        width = groups * rows // (2 * heads)
        gated = [
            Run(projection=0, row=start, rows=width) for half in (0, width) for start in range(half, rows, 2 * width)
        ]
        return BlockLayout(blocks=groups, runs=(*gated, *layout.runs[1:]), sections=layout.sections)


def _refuse_uneven(expression: str, parts: int, count: int, of: str = "rows") -> None:
    if parts < 1 or count % parts:
        raise LoraError(
            f"{expression}={parts}",
            reason=f"does not divide {count} {of} of a projection" if of == "rows" else f"does not divide {count} {of}",
            cure="check num_attention_heads and num_key_value_heads in the config",
        )
