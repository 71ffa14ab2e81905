"""The LoRA branch: `output += scale * B (A x)`, added in the last matmul.

One autograd function per site. The frozen base linear does not save its output, so the delta is accumulated into that
very buffer; nothing hidden-wide is allocated in the forward. What is communicated is the r-wide product alone (see
`region`).

Shape letters: T tokens seen by `x`, S tokens of the output (S = T * tp when gathered, T / tp when scattered),
n trained projections, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from lora_plugins_sdk.block_layout import padding_of
from lora_plugins_sdk.collectives import apply_collective
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.host_rows import HostOrder
from lora_plugins_sdk.input_gradient import input_share
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
        orders: per trained projection, where the host has its rows.
        padding: per trained projection, which of its rows here are a vocabulary's padding. They stay zero: a loss over
            all of the host's columns would train what no export holds.
        region: where the branch communicates.
        group: the TP group.
    """

    blocks: int
    block_rows: int
    orders: tuple[HostOrder, ...]
    padding: tuple[tuple[slice, ...], ...]
    region: Region
    group: dist.ProcessGroup | None

    def per_projection(
        self, rows: torch.Tensor, s: torch.Tensor, bs: Sequence[torch.Tensor]
    ) -> Iterator[tuple[HostOrder, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Views of `rows` `[S, blocks * block_rows]`, `s` `[S, n * r]` and the B's, batched over blocks.

        Yields:
            per trained projection: where the host has its rows; its part of `s`, the same for every block,
            `[blocks, S, r]`; and per span of a block (nearly always one) the columns that hold it `[blocks, S, span]`
            and its rows of B in the dtype of `rows` `[blocks, span, r]`.
        """
        blocked = rows.view(-1, self.blocks, self.block_rows).transpose(0, 1)
        parts = s.split(s.shape[1] // len(bs), dim=1)
        for order, part, b in zip(self.orders, parts, bs, strict=True):
            in_order = order.to_host(b).to(rows.dtype).split([count for _, count in order.spans], dim=1)
            spans = [
                (blocked[:, :, start : start + count], some)
                for (start, count), some in zip(order.spans, in_order, strict=True)
            ]
            yield order, part.expand(self.blocks, -1, -1), spans


class LoraBranch(torch.autograd.Function):
    """`output + scale * B (A x)` for all trained projections of one site."""

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
            bs: per projection `[its rows on this rank, r]`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        s = apply_collective(geometry.region.forward, tokens @ a.to(x.dtype).t(), geometry.group).mul_(scale)
        # An alias, not a view that autograd tracks: some hosts return a view made inside their own autograd function,
        # which must not be modified under autograd's eyes. The shared version counter still catches a host that saved
        # its output.
        result = output.detach()
        for _, part, spans in geometry.per_projection(result.view(-1, result.shape[-1]), s, bs):
            for columns, b in spans:
                columns.baddbmm_(part, b.transpose(1, 2))
        ctx.save_for_backward(tokens, s, a, *bs)
        ctx.geometry, ctx.scale, ctx.x_shape = geometry, scale, x.shape  # type: ignore[attr-defined]
        ctx.share = input_share(x)  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of output, x, A and every B; the r-wide gradient of `s` travels, nothing else."""
        tokens, s, a, *bs = ctx.saved_tensors
        geometry: BranchGeometry = ctx.geometry
        grad_bs, grad_parts = [], []
        projections = geometry.per_projection(grad.reshape(-1, grad.shape[-1]), s, bs)
        for (order, part, spans), padding in zip(projections, geometry.padding, strict=True):
            # s^T g, then transposed: the r-wide side first is up to twice as fast on a CPU as g^T s.
            grad_b = [torch.bmm(part.transpose(1, 2), columns).transpose(1, 2) for columns, _ in spans]
            grad_bs.append(order.from_host(_joined(grad_b)).to(bs[0].dtype))
            for rows in padding:
                grad_bs[-1][rows] = 0
            first, *more = (torch.bmm(columns, b).sum(0) for columns, b in spans)
            for one in more:
                first += one
            grad_parts.append(first)
        grad_s = torch.cat(grad_parts, dim=1).mul_(ctx.scale)
        grad_s = apply_collective(geometry.region.backward, grad_s, geometry.group)
        grad_a = (grad_s.t() @ tokens).to(a.dtype)
        grad_x = None
        if ctx.share is not None:
            narrow = a.to(grad_s.dtype)
            ctx.share.add = lambda grad: grad.addmm_(grad_s, narrow)
        elif ctx.needs_input_grad[1]:
            # In the shape of x from the start: a view would keep autograd from accumulating into it.
            grad_x = grad_s.view(*ctx.x_shape[:-1], -1) @ a.to(grad_s.dtype)
        return grad, grad_x, None, None, grad_a, *grad_bs


def _joined(spans: list[torch.Tensor]) -> torch.Tensor:
    return spans[0] if len(spans) == 1 else torch.cat(spans, dim=1)


def site_delta(plan: SitePlan, run: ParallelRun) -> Callable[[torch.Tensor, torch.Tensor, LoraFactors], torch.Tensor]:
    """The branch of one site as `delta(base_output, branch_input, factors)`.

    Raises no error of its own: layout and communication were checked when the table was derived.
    """
    assert isinstance(plan.region, Region), "experts have a branch of their own"
    tp, rank = (run.facts.tp, run.tp_rank) if plan.site.kind is SiteKind.COLUMN else (1, 0)
    geometry = BranchGeometry(
        blocks=plan.layout.blocks // tp,
        block_rows=plan.layout.block_rows,
        orders=tuple(HostOrder(plan.layout, index, tp) for index in plan.trained),
        padding=tuple(tuple(padding_of(plan.layout.split(index, tp), rank)) for index in plan.trained),
        region=plan.region,
        group=run.tp_group,
    )

    def delta(output: torch.Tensor, x: torch.Tensor, factors: LoraFactors) -> torch.Tensor:
        x = factors.drop(x)
        return LoraBranch.apply(output, x, geometry, factors.scale, factors.a, *factors.bs)  # type: ignore[return-value]

    return delta
