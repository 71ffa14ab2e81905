"""The branch of a word embedding: `output += scale * B A[:, ids]`.

A lookup is the linear of a one-hot input, so this is a row-parallel branch whose product with A is a selection of its
columns: each TP rank has those of its part of the vocabulary, ids of other parts select zero, and the r-wide sum over
TP makes the rest (see `region`). No gradient goes to ids.

Shape letters: b samples, s tokens of each, T = b * s, S tokens of the output (T, or T / tp when scattered), r rank.
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
from lora_plugins_sdk.table import SitePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGeometry:
    """Which tokens this rank knows, and how the branch communicates.

    Args:
        first: the first id of this rank's part of the vocabulary.
        count: ids of it that are a token's; the padding of the vocabulary has none, and gets no delta.
        region: where the branch communicates.
        group: the TP group.
    """

    first: int
    count: int
    region: Region
    group: dist.ProcessGroup | None

    def local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of this rank's A for flat ids, 0 for those of other ranks; and which are this rank's, `[T, 1]`."""
        mine = (ids >= self.first) & (ids < self.first + self.count)
        return (ids - self.first).where(mine, 0), mine.unsqueeze(1)


class LookupBranch(torch.autograd.Function):
    """`output + scale * B A[:, ids]`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        output: torch.Tensor,
        ids: torch.Tensor,
        geometry: LookupGeometry,
        scale: float,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        """Accumulate the delta into `output`'s storage.

        Args:
            output: base output, its tokens in the order of `ids`; overwritten.
            ids: flat token ids `[T]`.
            geometry: vocabulary and communication.
            scale: factor on the product.
            a: `[r, ids of this rank]`.
            b: `[hidden, r]`.
        """
        columns, mine = geometry.local(ids)
        known = a.t()[columns].to(output.dtype) * mine
        s = apply_collective(geometry.region.forward, known, geometry.group).mul_(scale)
        # As in `branch`: an alias that autograd does not track.
        result = output.detach()
        result.view(-1, result.shape[-1]).addmm_(s, b.to(s.dtype).t())
        ctx.save_for_backward(columns, mine, s, a, b)
        ctx.geometry, ctx.scale = geometry, scale  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of output, A and B; the r-wide gradient of `s` travels, nothing else."""
        columns, mine, s, a, b = ctx.saved_tensors
        geometry: LookupGeometry = ctx.geometry
        rows = grad.reshape(-1, grad.shape[-1])
        grad_b = (rows.t() @ s).to(b.dtype)
        grad_s = (rows @ b.to(rows.dtype)).mul_(ctx.scale)
        grad_s = apply_collective(geometry.region.backward, grad_s, geometry.group) * mine
        # A frequent token has thousands of terms in its column, and a GPU rounds after each addition.
        wide = torch.promote_types(a.dtype, torch.float32)
        sums = a.new_zeros(a.shape[1], a.shape[0], dtype=wide).index_add_(0, columns, grad_s.to(wide))
        grad_a = sums.to(a.dtype).t()
        return grad, None, None, None, grad_a, grad_b


def embedding_delta(
    plan: SitePlan, run: ParallelRun
) -> Callable[[torch.Tensor, torch.Tensor, LoraFactors], torch.Tensor]:
    """The branch of one embedding as `delta(base_output, ids, factors)`, `ids` `[b, s]`.

    The output is `[b, s, h]`, and `[s / tp, b, h]` under sequence parallelism. There is no dropout: PEFT has none on
    ids.

    Raises no error of its own: layout and communication were checked when the table was derived.
    """
    assert isinstance(plan.region, Region), "an embedding has no experts"
    a, _ = plan.rows
    first = run.tp_rank * a.local_shape[1]
    tokens = max(0, min(a.local_shape[1], a.full_shape[1] - first))
    geometry = LookupGeometry(first=first, count=tokens, region=plan.region, group=run.tp_group)
    sequence_first = run.facts.sequence_parallel

    def delta(output: torch.Tensor, ids: torch.Tensor, factors: LoraFactors) -> torch.Tensor:
        flat = (ids.t() if sequence_first else ids).reshape(-1)
        return LookupBranch.apply(output, flat, geometry, factors.scale, factors.a, *factors.bs)  # type: ignore[return-value]

    return delta
