"""The LoRA branch: `output += scale * B (A x)`, added in the last matmul.

One autograd function per site. The frozen base linear does not save its output, so the delta is accumulated into that
very buffer; nothing hidden-wide is allocated in the forward. What is communicated is the r-wide product alone (see
`region`).

Shape letters: T tokens seen by `x`, S tokens of the output (S = T * tp when gathered, T / tp when scattered),
n adapted projections, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from lora_plugins_sdk.collectives import apply_collective
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.region import Region
from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.table import SitePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchGeometry:
    """Where each adapted projection's rows lie in the local host output, and how the branch communicates.

    Args:
        blocks: local blocks of the host layout.
        block_rows: host output columns in one block.
        runs: per adapted projection, (first column within a block, number of columns).
        region: where the branch communicates.
        group: the TP group.
    """

    blocks: int
    block_rows: int
    runs: tuple[tuple[int, int], ...]
    region: Region
    group: dist.ProcessGroup | None

    def columns(self, rows: torch.Tensor, projection: int) -> torch.Tensor:
        """View of `[S, blocks * block_rows]` that holds one projection: `[blocks, S, run]`."""
        start, run = self.runs[projection]
        blocked = rows.view(rows.shape[0], self.blocks, self.block_rows)
        return blocked[:, :, start : start + run].transpose(0, 1)


class LoraBranch(torch.autograd.Function):
    """`output + scale * B (A x)` for all adapted projections of one site."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        output: torch.Tensor,
        x: torch.Tensor,
        geometry: BranchGeometry,
        scale: float,
        a: torch.Tensor,
        *bs: torch.Tensor,
    ) -> torch.Tensor:
        """Accumulate the delta into `output`'s storage.

        Args:
            output: base output, last dimension `blocks * block_rows`; overwritten.
            x: branch input, last dimension `in`.
            geometry: layout and communication.
            scale: factor on the product.
            a: `[n * r, in]`, the stacked A factors.
            bs: per projection `[blocks * run, r]`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        s = apply_collective(geometry.region.forward, tokens @ a.to(x.dtype).t(), geometry.group)
        # An alias, not a view that autograd tracks: some hosts return a view made inside their own autograd function,
        # which must not be modified under autograd's eyes. The shared version counter still catches a host that saved
        # its output.
        result = output.detach()
        rows = result.view(-1, result.shape[-1])
        for index, (b, part) in enumerate(zip(bs, s.split(s.shape[1] // len(bs), dim=1), strict=True)):
            _add_product(geometry.columns(rows, index), part, b.to(x.dtype), scale)
        ctx.save_for_backward(tokens, s, a, *bs)
        ctx.geometry, ctx.scale, ctx.x_shape = geometry, scale, x.shape  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of output, x, A and every B; the r-wide gradient of `s` travels, nothing else."""
        tokens, s, a, *bs = ctx.saved_tensors
        geometry: BranchGeometry = ctx.geometry
        width = s.shape[1] // len(bs)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_s = torch.empty_like(s)
        grad_bs = []
        for index, b in enumerate(bs):
            part = slice(index * width, (index + 1) * width)
            columns = geometry.columns(rows, index)
            grad_bs.append(_b_gradient(columns, s[:, part], ctx.scale).to(b.dtype))
            _s_gradient(columns, b.to(grad.dtype), ctx.scale, out=grad_s[:, part])
        grad_s = apply_collective(geometry.region.backward, grad_s, geometry.group)
        grad_a = (grad_s.t() @ tokens).to(a.dtype)
        grad_x = (grad_s @ a.to(grad_s.dtype)).view(ctx.x_shape) if ctx.needs_input_grad[1] else None
        return grad, grad_x, None, None, grad_a, *grad_bs


def _add_product(columns: torch.Tensor, s: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """`columns[block] += scale * s b[block]^T`; columns `[blocks, S, run]`, s `[S, r]`, b `[blocks * run, r]`."""
    for block, b_block in zip(columns, b.chunk(columns.shape[0]), strict=True):
        block.addmm_(s, b_block.t(), alpha=scale)


def _b_gradient(columns: torch.Tensor, s: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale * columns^T s`, `[blocks * run, r]`."""
    return torch.cat([block.t() @ s for block in columns]).mul_(scale)


def _s_gradient(columns: torch.Tensor, b: torch.Tensor, scale: float, *, out: torch.Tensor) -> None:
    """`out = scale * sum over blocks of columns[block] b[block]`, `[S, r]`."""
    for index, (block, b_block) in enumerate(zip(columns, b.chunk(columns.shape[0]), strict=True)):
        out.addmm_(block, b_block, alpha=scale, beta=1.0 if index else 0.0)


def site_delta(plan: SitePlan, run: ParallelRun) -> Callable[[torch.Tensor, torch.Tensor, LoraFactors], torch.Tensor]:
    """The branch of one site as `delta(base_output, branch_input, factors)`.

    Raises no error of its own: layout and communication were checked when the table was derived.
    """
    tp = run.facts.tp if plan.site.kind is SiteKind.COLUMN else 1
    geometry = BranchGeometry(
        blocks=plan.layout.blocks // tp,
        block_rows=plan.layout.block_rows,
        runs=tuple((plan.layout.run_offset(index), plan.layout.runs[index]) for index in plan.adapted),
        region=plan.region,
        group=run.tp_group,
    )

    def delta(output: torch.Tensor, x: torch.Tensor, factors: LoraFactors) -> torch.Tensor:
        x = factors.drop(x)
        return LoraBranch.apply(output, x, geometry, factors.scale, factors.a, *factors.bs)  # type: ignore[return-value]

    return delta
