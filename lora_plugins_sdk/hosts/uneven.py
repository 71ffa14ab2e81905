"""All-gather of parts of unequal length, which gloo lacks: padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_uneven(local: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`[lengths[rank], ...]` of every rank as `[sum(lengths), ...]`, in rank order."""
    longest = max(lengths)
    missing = longest - local.shape[0]
    padded = torch.cat([local, local.new_zeros(missing, *local.shape[1:])])
    gathered = local.new_empty(longest * len(lengths), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(gathered.split(longest), lengths, strict=True)])
