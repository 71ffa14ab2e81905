"""The r-wide collectives of a branch, on flattened tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lora_plugins_sdk.region import Collective


def apply_collective(collective: Collective, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Apply one collective over the TP group to `[tokens, width]`.

    Tokens are sequence-major, so gathering or scattering along the first dimension is gathering or scattering the
    sequence.

    Args:
        collective: what to do; NONE returns `rows` itself.
        rows: `[tokens, width]`, contiguous; ALL_REDUCE overwrites it.
        group: the TP group; unused by NONE.

    Returns:
        `[tokens, width]`, `[tokens * tp, width]` for ALL_GATHER or `[tokens / tp, width]` for REDUCE_SCATTER.
    """
    if collective is Collective.NONE:
        return rows
    assert group is not None, "a parallel branch needs its TP group"
    if collective is Collective.ALL_REDUCE:
        dist.all_reduce(rows, group=group)
        return rows
    size = group.size()
    if collective is Collective.ALL_GATHER:
        gathered = rows.new_empty(rows.shape[0] * size, rows.shape[1])
        dist.all_gather_into_tensor(gathered, rows, group=group)
        return gathered
    scattered = rows.new_empty(rows.shape[0] // size, rows.shape[1])
    dist.reduce_scatter_tensor(scattered, rows, group=group)
    return scattered
