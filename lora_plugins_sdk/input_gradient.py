"""The branch's share of the input gradient, added inside the gradient that the frozen linear makes.

Left to autograd, the branch would write a second gradient as wide as the input and autograd would add the two: on a CPU
that costs as much as half of the branch. Here the branch leaves its r-wide gradient with the input, and the last matmul
accumulates into the linear's own gradient once that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(slots=True)
class InputShare:
    """How a branch adds to the gradient of its input, in place, given as `[T, in]`; None when it adds nothing."""

    add: Callable[[torch.Tensor], None] | None = None


class BranchInput(torch.autograd.Function):
    """Identity on the input of a host linear; its backward completes the gradient in place.

    The result must go to that linear and to its branch only: the linear has just made the gradient for this one reader,
    which is what makes it safe to write into.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        """An alias of `x`."""
        ctx.share = InputShare()  # type: ignore[attr-defined]
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The linear's gradient, plus what the branch left."""
        share: InputShare = ctx.share
        if share.add is None:
            return grad
        grad = grad.contiguous()
        share.add(grad.view(-1, grad.shape[-1]))
        share.add = None
        return grad


def input_share(x: torch.Tensor) -> InputShare | None:
    """Where a branch may leave its share of the gradient of `x`; None if `x` comes from anything but `BranchInput`."""
    share = getattr(x.grad_fn, "share", None)
    return share if isinstance(share, InputShare) else None
