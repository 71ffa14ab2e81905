"""The LoRA branch of routed experts: `output += scale * B_e (A_e x)` for the tokens of each expert e.

As `branch`, one autograd function per site that accumulates into the base output; it communicates nothing, since the
dispatcher around the experts does (see `region.ExpertRegion`).

Shape letters: T tokens of the local experts, sorted by expert; E local experts, or 1 for a factor that all share; n
adapted projections; r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.grouped_matmul import Groups, add_grouped_linear, grouped_linear, grouped_outer
from lora_plugins_sdk.input_gradient import input_share
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.table import SitePlan

# Tokens of each expert, as the host's grouped linear takes them.
Splits = Sequence[int] | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertColumns:
    """Columns of the local host output that hold each adapted projection: (first, number)."""

    spans: tuple[tuple[int, int], ...]

    def per_projection(
        self, rows: torch.Tensor, s: torch.Tensor, bs: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views of `rows` `[T, out]` and `s` `[T, n * r]`, and B `[E, run, r]` in the dtype of `rows`."""
        parts = s.split(s.shape[1] // len(bs), dim=1)
        for (start, count), part, b in zip(self.spans, parts, bs, strict=True):
            yield rows[:, start : start + count], part, b.to(rows.dtype)


class ExpertBranch(torch.autograd.Function):
    """`output + scale * B_e (A_e x)` for all adapted projections of one site."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        output: torch.Tensor,
        x: torch.Tensor,
        groups: Groups,
        columns: ExpertColumns,
        scale: float,
        a: torch.Tensor,
        *bs: torch.Tensor,
    ) -> torch.Tensor:
        """Accumulate the delta into `output`'s storage.

        Args:
            output: base output `[T, out]`; overwritten.
            x: branch input `[T, in]`.
            groups: tokens of each local expert.
            columns: where each projection lies.
            scale: factor on the product.
            a: `[E, n * r, in]`, the stacked A factors.
            bs: per projection `[E, run, r]`.
        """
        s = grouped_linear(x, a.to(x.dtype), groups).mul_(scale)
        result = output.detach()  # an alias, as in `LoraBranch`
        for part_of_output, part, b in columns.per_projection(result, s, bs):
            add_grouped_linear(part_of_output, part, b, groups)
        ctx.save_for_backward(x, s, a, *bs)
        ctx.groups, ctx.columns, ctx.scale = groups, columns, scale  # type: ignore[attr-defined]
        ctx.share = input_share(x)  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of output, x, A and every B."""
        x, s, a, *bs = ctx.saved_tensors
        groups: Groups = ctx.groups
        grad_bs, grad_parts = [], []
        # Contiguous: the sum of a loss gives an expanded gradient, whose rows have no stride.
        for grad_of_output, part, b in ctx.columns.per_projection(grad.contiguous(), s, bs):
            # s^T g, then transposed: the r-wide side first is up to twice as fast on a CPU as g^T s.
            grad_b = grouped_outer(part, grad_of_output, groups, b.shape[0]).transpose(1, 2)
            grad_bs.append(grad_b.to(bs[0].dtype))
            grad_parts.append(grouped_linear(grad_of_output, b.transpose(1, 2), groups))
        grad_s = torch.cat(grad_parts, dim=1).mul_(ctx.scale)
        grad_a = grouped_outer(grad_s, x, groups, a.shape[0]).to(a.dtype)
        to_input = a.to(grad_s.dtype).transpose(1, 2)
        grad_x = None
        if ctx.share is not None:
            ctx.share.add = lambda grad: add_grouped_linear(grad, grad_s, to_input, groups)
        elif ctx.needs_input_grad[1]:
            grad_x = grouped_linear(grad_s, to_input, groups)
        return grad, grad_x, None, None, None, grad_a, *grad_bs


def expert_delta(plan: SitePlan, run: ParallelRun) -> Callable[..., torch.Tensor]:
    """The branch of one site as `delta(base_output, branch_input, factors, m_splits)`."""
    etp = run.facts.etp if plan.site.kind is SiteKind.COLUMN else 1
    assert plan.layout.blocks == etp, "experts are packed shard by shard"
    columns = ExpertColumns(spans=tuple(plan.layout.spans(index)[0] for index in plan.trained))

    def delta(output: torch.Tensor, x: torch.Tensor, factors: LoraFactors, m_splits: Splits) -> torch.Tensor:
        x = factors.drop(x)
        groups = Groups(m_splits, x.device)
        return ExpertBranch.apply(output, x, groups, columns, factors.scale, factors.a, *factors.bs)  # type: ignore[return-value]

    return delta
