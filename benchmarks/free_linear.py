"""A linear that costs nothing: what is timed around it is the branch alone.

The branch takes a few hundredths of its frozen linear's time. As a difference of two such times it drowns in their
noise; over a linear that hands out buffers it is measured to a few percent, with everything that autograd does for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Buffers(torch.autograd.Function):
    """Returns `output`, and `grad_x` as the gradient of `x`, whatever their contents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, grad_x: Tensor) -> Tensor:
        ctx.grad_x = grad_x
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.grad_x, None, None


class _Same(torch.autograd.Function):
    """Stands for the norm: a node of its own, whose gradient is the sum of what linear and branch give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def free_forward(weight: Tensor, tokens: int, *, fused_norm: bool) -> Callable[[Tensor], tuple[Any, None]]:
    """Forward of a host linear with this weight `[out, in]`, on `[tokens, 1, in]`: its contract, but no work."""
    out, width = weight.shape
    output, grad_x = torch.zeros(tokens, 1, out), torch.zeros(tokens, 1, width)

    def forward(x: Tensor) -> tuple[Any, None]:
        if not fused_norm:
            return _Buffers.apply(x, output, grad_x), None
        normed: Any = _Same.apply(x)
        return (_Buffers.apply(normed, output, grad_x), normed), None

    return forward


class FreeLinear(nn.Linear):
    """An `nn.Linear` (so that PEFT wraps it) that computes nothing."""

    def __init__(self, width: int, out: int, tokens: int) -> None:
        super().__init__(width, out, bias=False)
        self.requires_grad_(False)
        self._forward = free_forward(self.weight, tokens, fused_norm=False)

    def forward(self, input: Tensor) -> Tensor:
        """`[tokens, 1, in] -> [tokens, 1, out]`."""
        return self._forward(input)[0]
