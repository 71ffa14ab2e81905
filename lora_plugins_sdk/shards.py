"""One rank's part of a full factor, and the full factor from every rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from lora_plugins_sdk.block_layout import Section, slabs_of
from lora_plugins_sdk.table import ParamRow


class Place(Protocol):
    """Which part of the factors a rank holds."""

    @property
    def tp_rank(self) -> int: ...
    @property
    def etp_rank(self) -> int: ...
    @property
    def ep_rank(self) -> int: ...


def shard(row: ParamRow, full: torch.Tensor, place: Place) -> torch.Tensor:
    """This rank's part `row.local_shape` of a full factor in HF order; host padding is zero."""
    if row.expert_dim == 0:
        mine = local_experts(row, place)
        full = full[mine.start : mine.stop]
    return tensor_parallel_part(row, full, place)


def local_experts(row: ParamRow, place: Place) -> range:
    """Numbers of the experts whose factors this rank holds."""
    count = row.local_shape[0]
    start = place.ep_rank * count if row.expert_dim == 0 else 0
    return range(start, start + count)


def tensor_parallel_part(row: ParamRow, full: torch.Tensor, place: Place) -> torch.Tensor:
    """This rank's part of the rows or columns of a factor that has its experts already."""
    rank = place.etp_rank if row.expert else place.tp_rank
    if _parts_columns(row):
        width, at = row.local_shape[-1], rank if _splits_columns(row) else 0
        part = full[..., at * width : (at + 1) * width]
        return nn.functional.pad(part, (0, width - part.shape[-1])) if part.shape[-1] < width else part

    def read(start: int, stop: int) -> torch.Tensor:
        return full[..., start:stop, :]

    return local_rows(row.sections, _row_rank(row, rank), read, dim=-2)


def unshard(row: ParamRow, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A factor's rows and columns in HF order from the parts of all TP (ETP) ranks, in new memory.

    Args:
        row: the factor.
        parts: of each rank; of any one rank where every rank holds the whole. All experts, or the local ones.
    """
    if _parts_columns(row):
        whole = torch.cat(list(parts) if _splits_columns(row) else [parts[0]], dim=-1)
        # Of a padded vocabulary the padding goes; in new memory.
        return whole if whole.shape[-1] == row.full_shape[-1] else whole[..., : row.full_shape[-1]].contiguous()
    full = parts[0].new_empty(*parts[0].shape[:-2], *row.full_shape[-2:])
    for rank, part in enumerate(parts):
        for slab in slabs_of(row.sections, _row_rank(row, rank)):
            full[..., slab.hf : slab.hf + slab.rows, :] = part[..., slab.local : slab.local + slab.rows, :]
    return full


def local_rows(
    sections: Sequence[Section], rank: int, read: Callable[[int, int], torch.Tensor], dim: int = 0
) -> torch.Tensor:
    """One rank's rows, section after section; host padding rows are zero.

    Args:
        sections: how the rows are split over the ranks.
        rank: whose.
        read: gives HF rows `[start, stop)`.
        dim: dimension of the rows.
    """
    parts = []
    for section, slab in zip(sections, slabs_of(sections, rank), strict=True):
        part = read(slab.hf, slab.hf + slab.rows)
        missing = section.local - slab.rows
        if missing:
            shape = list(part.shape)
            shape[dim] = missing
            part = torch.cat([part, part.new_zeros(shape)], dim)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _parts_columns(row: ParamRow) -> bool:
    """Whether ranks hold other columns than HF has: TP splits them, or they are a vocabulary's, with its padding."""
    return _splits_columns(row) or row.local_shape[-1] != row.full_shape[-1]


def _splits_columns(row: ParamRow) -> bool:
    return row.partition_dim == len(row.full_shape) - 1


def _row_rank(row: ParamRow, rank: int) -> int:
    """Which of the parts of the rows a rank holds: the only one where they are not split."""
    return rank if row.partition_dim == len(row.full_shape) - 2 else 0
