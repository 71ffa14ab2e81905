"""Weights that every tensor parallel rank holds whole and applies to its own part of the work."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn


def empty_weight(*shape: int, config: Any, sequence_parallel: bool = False) -> nn.Parameter:
    """An uninitialised weight of `shape`.

    Args:
        sequence_parallel: it is applied to this rank's tokens only; megatron-core then sums its gradient over TP.
    """
    weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return weight


def shared_by_heads(weight: Tensor, group: Any) -> Tensor:
    """The weight as it is; its gradient becomes the sum over the ranks, each of which applies it to its own heads."""
    return copy_to_tensor_model_parallel_region(weight, group=group)
