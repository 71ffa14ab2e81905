"""One rank's part of a full factor, and the full factor from every rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lora_plugins_sdk.block_layout import Section, slabs_of
from lora_plugins_sdk.table import ParamRow


def shard(row: ParamRow, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """This rank's part `row.local_shape` of a full factor in HF order; host padding rows are zero."""
    if row.partition_dim == 1:
        width = row.local_shape[1]
        return full[:, tp_rank * width : (tp_rank + 1) * width]
    return local_rows(row.sections, _row_rank(row, tp_rank), lambda start, stop: full[start:stop])


def unshard(row: ParamRow, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full factor `row.full_shape` in HF order from the parts of all TP ranks: the inverse of `shard`.

    Args:
        row: the factor.
        parts: `row.local_shape` of each rank; of any one rank where every rank holds the whole.
    """
    if row.partition_dim == 1:
        return torch.cat(list(parts), dim=1)
    full = parts[0].new_empty(row.full_shape)
    for tp_rank, part in enumerate(parts):
        for slab in slabs_of(row.sections, _row_rank(row, tp_rank)):
            full[slab.hf : slab.hf + slab.rows] = part[slab.local : slab.local + slab.rows]
    return full


def local_rows(sections: Sequence[Section], rank: int, read: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """One rank's rows, section after section; host padding rows are zero.

    Args:
        sections: how the rows are split over the ranks.
        rank: whose.
        read: gives HF rows `[start, stop)`.
    """
    parts = []
    for section, slab in zip(sections, slabs_of(sections, rank), strict=True):
        part = read(slab.hf, slab.hf + slab.rows)
        missing = section.local - slab.rows
        parts.append(torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _row_rank(row: ParamRow, tp_rank: int) -> int:
    """Which of the parts of the rows a rank holds: the only one where TP does not split them."""
    return tp_rank if row.partition_dim == 0 else 0
