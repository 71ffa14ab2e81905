"""Packs: how one host weight interleaves the rows of several HF projections.

Every host layout met so far is a sequence of *blocks*; a block holds, for each projection in order, a *run* of
consecutive rows.

    query groups   block = one group          [q q q | k | v]  [q q q | k | v] ...
    gate | up      block = one TP shard       [gate | up]      [gate | up] ...

TP splits between blocks, so a rank's share of every projection is a contiguous slab of HF rows. Both directions (HF ->
host and host -> HF) are read off this one description.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """A resolved pack.

    Args:
        blocks: number of blocks in the full host weight; a multiple of the TP size.
        runs: rows of each projection within one block.
        rows: HF rows of each projection. `blocks * run - rows` rows at the very end are padding that HF does not have.
    """

    blocks: int
    runs: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def block_rows(self) -> int:
        """Host rows in one block."""
        return sum(self.runs)

    @property
    def host_rows(self) -> int:
        """Rows of the full host weight, padding included."""
        return self.blocks * self.block_rows

    def run_offset(self, projection: int) -> int:
        """First row of a projection's run within a block."""
        return sum(self.runs[:projection])

    def padded_rows(self, projection: int) -> int:
        """Rows of a projection in the host, padding included."""
        return self.blocks * self.runs[projection]

    def hf_slab(self, projection: int, rank: int, tp: int) -> tuple[int, int]:
        """HF rows `[start, stop)` of a projection on TP rank `rank`; shorter than the host's where it pads."""
        size = self.padded_rows(projection) // tp
        limit = self.rows[projection]
        return min(rank * size, limit), min((rank + 1) * size, limit)

    def host_index(self) -> list[tuple[int, int]]:
        """For every host row, in order: (projection, HF row). Rows past a projection's `rows` are padding."""
        return [
            (projection, block * run + row)
            for block in range(self.blocks)
            for projection, run in enumerate(self.runs)
            for row in range(run)
        ]


class Pack(Protocol):
    """Declares a layout; `resolve` turns it into numbers for one model and TP size."""

    def resolve(self, dims: ModelDims, rows: Sequence[int], tp: int) -> BlockLayout:
        """Layout for projections with these HF row counts.

        Raises:
            LoraError: TP does not divide the layout.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Concat:
    """Each TP shard concatenates its own rows of every projection (`[gate_shard | up_shard]`); one projection is the
    plain case.

    Args:
        pad: round the rows up to a multiple of the TP size (vocabulary); padding rows are zero and never exported.
    """

    pad: bool = False

    def resolve(self, dims: ModelDims, rows: Sequence[int], tp: int) -> BlockLayout:
        for count in rows:
            if count % tp and not self.pad:
                raise LoraError(
                    f"tensor parallel size {tp}",
                    reason=f"does not divide a projection of {count} rows",
                    cure=f"use a tensor parallel size that divides {count}",
                )
        return BlockLayout(blocks=tp, runs=tuple(-(-count // tp) for count in rows), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryGroups:
    """Megatron's fused attention input: per key/value head, its query heads, then the key head, then the value head.

    Args:
        groups: config expression for the number of key/value heads.
    """

    groups: str = "num_key_value_heads"

    def __post_init__(self) -> None:
        check_expression(self.groups)

    def resolve(self, dims: ModelDims, rows: Sequence[int], tp: int) -> BlockLayout:
        groups = dims.resolve(self.groups)
        if groups % tp:
            raise LoraError(
                f"tensor parallel size {tp}",
                reason=f"does not divide the {groups} key/value heads: a head would be cut or replicated",
                cure=f"use a tensor parallel size that divides {groups}",
            )
        for count in rows:
            if count % groups:
                raise LoraError(
                    f"{self.groups}={groups}",
                    reason=f"does not divide a projection of {count} rows",
                    cure="check num_attention_heads and num_key_value_heads in the config",
                )
        return BlockLayout(blocks=groups, runs=tuple(count // groups for count in rows), rows=tuple(rows))
