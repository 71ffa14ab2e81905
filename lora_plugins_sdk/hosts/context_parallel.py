"""Context parallelism on the torch host: who holds which tokens, and keys and values from all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lora_plugins_sdk.errors import LoraError


def zigzag_positions(length: int, rank: int, size: int) -> Tensor:
    """Positions `[length / size]` of one context parallel rank, as megatron-core deals them out.

    Of 2 * size equal parts, rank r holds the r-th from the front and from the back, so that causal attention costs
    every rank the same.

    Raises:
        LoraError: 2 * size does not divide the length.
    """
    if length % (2 * size):
        raise LoraError(
            f"sequence length {length}",
            reason=f"cannot be dealt out in {2 * size} equal parts to {size} context parallel ranks",
            cure=f"pad it to a multiple of {2 * size}",
        )
    parts = torch.arange(length).chunk(2 * size)
    return torch.cat([parts[rank], parts[-1 - rank]])


def gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[tokens of this rank, ...]` of every context parallel rank as `[all tokens, ...]`, in the order of the text.

    Differentiable: a rank's gradient is the sum over what all ranks made of its tokens.
    """
    size = group.size()
    held = torch.cat([zigzag_positions(local.shape[0] * size, rank, size) for rank in range(size)])
    gathered: Tensor = _AllGather.apply(local.contiguous(), group)  # type: ignore[assignment]
    return gathered[held.argsort().to(local.device)]


class _AllGather(torch.autograd.Function):
    """All-gather along the first dimension, in rank order; reduce-scatter backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        gathered = local.new_empty(local.shape[0] * group.size(), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local, group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        local = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, grad.contiguous(), group=ctx.group)
        return local, None
