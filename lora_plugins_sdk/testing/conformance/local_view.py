"""What one rank should hold of a full tensor, and its linears' outputs as HF projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import EXPERT, SiteKind
from lora_plugins_sdk.table import SitePlan
from lora_plugins_sdk.testing.conformance.observe.observation import RankObservation


def batch_first(captured: Sequence[Tensor]) -> Tensor:
    """Captured `[tokens, samples, width]` of each microbatch as `[microbatches, samples, tokens, width]`."""
    return torch.stack(list(captured)).transpose(1, 2)


def by_projection(plan: SitePlan, facts: RunFacts, tp_rank: int, local: Tensor) -> dict[str, Tensor]:
    """This rank's columns of each adapted projection, in HF order and without host padding.

    Args:
        plan: the site.
        facts: of the run that `local` comes from.
        tp_rank: this rank's.
        local: the linear's output (or its gradient), `[..., host columns of this rank]`.
    """
    return {
        name: local[..., [column for _, column in columns]] for name, columns in _columns(plan, facts, tp_rank).items()
    }


def output_columns(plan: SitePlan, facts: RunFacts, tp_rank: int) -> dict[str, list[int]]:
    """Which of a projection's columns a rank holds, ascending."""
    return {name: [row for row, _ in columns] for name, columns in _columns(plan, facts, tp_rank).items()}


def _columns(plan: SitePlan, facts: RunFacts, tp_rank: int) -> dict[str, list[tuple[int, int]]]:
    """Per adapted projection, (HF row, this rank's column), read off the host's order row by row."""
    split = plan.site.kind is SiteKind.COLUMN
    width = plan.layout.host_rows // (facts.tp if split else 1)
    first = tp_rank * width if split else 0
    held: dict[int, list[tuple[int, int]]] = {index: [] for index in plan.adapted}
    for column, (projection, row) in enumerate(plan.layout.host_index()[first : first + width]):
        if projection in held and row is not None:
            held[projection].append((row, column))
    return {
        plan.site.projections[index].hf.format(layer=plan.layer, expert=EXPERT): sorted(columns)
        for index, columns in held.items()
    }


def input_columns(plan: SitePlan, facts: RunFacts, tp_rank: int, width: int) -> slice:
    """Which of the linear's input columns a rank holds."""
    if plan.site.kind is not SiteKind.ROW:
        return slice(0, width)
    return slice(tp_rank * width // facts.tp, (tp_rank + 1) * width // facts.tp)


def tokens_of(facts: RunFacts, seen: RankObservation, *, split_over_tp: bool) -> Tensor:
    """Positions that a rank holds of each sequence.

    Args:
        facts: of the run.
        seen: says which rank it is.
        split_over_tp: the tensor lies where sequence parallelism splits tokens over TP.
    """
    mine = seen.positions
    return mine.chunk(facts.tp)[seen.tp_rank] if split_over_tp and facts.sequence_parallel else mine


def microbatches_of(facts: RunFacts, seen: RankObservation, count: int) -> Tensor:
    """Microbatches that a rank was dealt."""
    return torch.arange(seen.dp_rank, count, facts.dp)
