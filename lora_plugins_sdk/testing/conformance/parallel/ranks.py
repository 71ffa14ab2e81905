"""A layout's ranks next to what one process saw, cut to what each rank should hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.table import ParameterTable, ParamRow, SitePlan
from lora_plugins_sdk.testing.conformance.compare import BOUND
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import relative_error
from lora_plugins_sdk.testing.conformance.expectation import Expectation, one_process
from lora_plugins_sdk.testing.conformance.expert_view import all_experts
from lora_plugins_sdk.testing.conformance.local_view import (
    batch_first,
    by_projection,
    input_columns,
    microbatches_of,
    output_columns,
    tokens_of,
)
from lora_plugins_sdk.testing.conformance.observe.observation import RankObservation, observed
from lora_plugins_sdk.testing.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One tensor of one rank and what it must be, `[microbatches, samples, tokens, width]`; of routed experts the sums
    over their tokens on all ranks, `[experts, width]`.
    """

    seen: RankObservation
    plan: SitePlan
    projection: str | None
    actual: Tensor
    expected: Tensor

    @property
    def error(self) -> float:
        """Relative to the largest expected entry."""
        return relative_error(self.actual, self.expected)

    @property
    def wrong(self) -> bool:
        """Whether the error is above the bound."""
        return not self.error <= BOUND


@dataclass(frozen=True)
class Ranks:
    """What the ranks of a layout saw."""

    layout: Layout
    table: ParameterTable
    seen: list[RankObservation]
    alone: Expectation

    @classmethod
    def of(cls, context: Context, layout: Layout) -> Ranks:
        """The layout's ranks, observed once."""

        def make() -> Ranks:
            seen, alone = observed(context, layout), one_process(context)
            return cls(layout, context.subject.table(layout), seen, alone)

        return context.keep(("ranks", layout), make)

    @property
    def share(self) -> int:
        """Factor on what flows back through a rank: the host averages over DP, and over CP, only factor gradients."""
        return self.layout.dp * self.layout.cp

    def holders_of_shares(self, row: ParamRow, one: RankObservation) -> list[RankObservation]:
        """Ranks whose shares of a factor's gradient make the whole; none where each rank holds a part of its own."""
        if row.partition_dim >= 0:
            return []
        if not row.expert:
            return self.tp_peers(one)
        shared = row.full_shape[0] == 1
        return [
            other
            for other in self.seen
            if (other.pp_rank, other.expert_dp_rank) == (one.pp_rank, one.expert_dp_rank)
            and (shared or other.ep_rank == one.ep_rank)
        ]

    def tp_peers(self, one: RankObservation) -> list[RankObservation]:
        """The ranks of one TP group, in its order."""
        return [other for other in self.seen if _place(other) == _place(one)]

    @cached_property
    def outputs(self) -> list[Pair]:
        """Outputs of every adapted projection, in the order of the forward pass."""
        return list(self._by_projection("outputs"))

    @cached_property
    def output_grads(self) -> list[Pair]:
        """Gradients of these outputs."""
        return list(self._by_projection("output_grads"))

    def _by_projection(self, quantity: str) -> Iterator[Pair]:
        facts = self.layout
        full = getattr(self.alone, quantity)
        scale = self.share if quantity == "output_grads" else 1
        for plan in self.table.plans:
            if plan.site.experts:
                yield from self._of_experts(plan, quantity, full, scale)
                continue
            for seen in self.seen:
                captured = getattr(seen.captured, quantity).get(plan.host_module)
                if captured is None:
                    continue
                columns = output_columns(plan, facts, seen.tp_rank)
                local = by_projection(plan, facts, seen.tp_rank, batch_first(captured))
                for name, actual in local.items():
                    split = plan.site.kind is not SiteKind.COLUMN
                    expected = self._cut(full[name], seen, split_over_tp=split)[..., columns[name]]
                    yield Pair(seen=seen, plan=plan, projection=name, actual=actual, expected=expected * scale)

    @cached_property
    def input_grads(self) -> list[Pair]:
        """Gradients of every adapted linear's input, in the order of the forward pass."""
        found: list[Pair] = []
        for plan in self.table.plans:
            if plan.site.experts:
                found += self._of_experts(plan, "input_grads", self.alone.input_grads, self.share)
                continue
            for seen in self.seen:
                captured = seen.captured.input_grads.get(plan.host_module)
                if captured is None:
                    continue
                full = self.alone.input_grads[plan.host_module]
                columns = input_columns(plan, self.layout, seen.tp_rank, full.shape[-1])
                expected = self._cut(full, seen, split_over_tp=plan.site.kind is not SiteKind.ROW)[..., columns]
                actual = batch_first(captured)
                expected = expected * self.share
                found.append(Pair(seen=seen, plan=plan, projection=None, actual=actual, expected=expected))
        return found

    def _of_experts(self, plan: SitePlan, quantity: str, full: Mapping[str, Tensor], scale: int) -> Iterator[Pair]:
        """Sums over each expert's tokens on all ranks, filed under the first of them."""
        ranks = [seen for seen in self.seen if plan.host_module in getattr(seen.captured, quantity)]
        if not ranks:
            return
        for name, actual in all_experts(plan, self.layout, ranks, quantity).items():
            projection = None if name == plan.host_module else name
            expected = full[name] * scale
            yield Pair(seen=ranks[0], plan=plan, projection=projection, actual=actual, expected=expected)

    def _cut(self, full: Tensor, seen: RankObservation, *, split_over_tp: bool) -> Tensor:
        mine = full[microbatches_of(self.layout, seen, full.shape[0])]
        return mine[:, :, tokens_of(self.layout, seen, split_over_tp=split_over_tp)]


def _place(one: RankObservation) -> tuple[object, ...]:
    """Where a rank is but for TP."""
    return one.pp_rank, one.dp_rank, tuple(one.positions.tolist())
