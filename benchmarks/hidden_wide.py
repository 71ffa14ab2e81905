"""A branch that communicates hidden states under sequence parallelism: the form to compare bytes with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from lora_plugins_sdk import ParallelRun, SiteKind, SitePlan, hookimpl
from lora_plugins_sdk.factors import LoraFactors


class HiddenWide:
    """A plugin object whose branch gathers its input (COLUMN) or reduces its delta (ROW) at full width.

    Args:
        shared_input: gather once for all projections of a linear, else once for each.
    """

    def __init__(self, *, shared_input: bool) -> None:
        self.shared_input = shared_input

    @hookimpl
    def lora_site_delta(self, plan: SitePlan, run: ParallelRun) -> Callable[..., Tensor]:
        """The branch of one site."""
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        column = plan.site.kind is SiteKind.COLUMN
        blocks = plan.layout.blocks // (run.facts.tp if column else 1)

        def gather(x: Tensor) -> Tensor:
            return gather_from_sequence_parallel_region(x, group=run.tp_group) if column else x

        def delta(output: Tensor, x: Tensor, factors: LoraFactors) -> Tensor:
            once = gather(x) if self.shared_input else None
            products = [
                linear(linear(gather(x) if once is None else once, a), b)
                for a, b in zip(factors.a.chunk(len(factors.bs)), factors.bs, strict=True)
            ]
            blocked = [product.view(*product.shape[:-1], blocks, -1) for product in products]
            joined = torch.cat(blocked, dim=-1).flatten(-2)
            if not column:
                joined = reduce_scatter_to_sequence_parallel_region(joined, group=run.tp_group)
            return output + factors.scale * joined

        return delta
