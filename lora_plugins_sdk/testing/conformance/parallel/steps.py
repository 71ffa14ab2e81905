"""Two optimizer steps with B != 0: the factors move as in one process, and replicas stay bit for bit equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lora_plugins_sdk.shards import shard
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import BOUND, parallel_ratios
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import Suspects, likely_cause, relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.parallel.ranks import Ranks
from lora_plugins_sdk.testing.conformance.problem import make_problem
from lora_plugins_sdk.testing.layout import Layout

_LEAST_MOVE = 1e-3
_STEPS = "see `gradients`; if that is right, state is kept, lost or not reduced from one step to the next"


def _two_steps(context: Context, layout: Layout) -> Iterator[Finding]:
    """Compares the way that each factor went, not where it stands: the way is the smaller number."""
    ranks, start = Ranks.of(context, layout), make_problem(context.subject).factors
    for row in ranks.table.rows:
        moved = ranks.alone.stepped[row.init_key] - start[row.init_key]
        if relative_error(moved + start[row.init_key], start[row.init_key]) < _LEAST_MOVE:
            yield factor_finding("two steps", row, cause="the factor does not move, also in one process")
            continue
        for seen in ranks.seen:
            if row.init_key not in seen.stepped:
                continue
            context.exercised([row.host_module])
            actual = seen.stepped[row.init_key] - shard(row, start[row.init_key], seen)
            expected = shard(row, moved, seen)
            error = relative_error(actual, expected)
            if not error <= BOUND:
                cause = likely_cause(actual, expected, Suspects(ratios=parallel_ratios(layout), fallback=_STEPS))
                yield factor_finding("change in two steps", row, cause=cause, error=error, bound=BOUND, rank=seen.rank)


def _replicas(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    for row in ranks.table.rows:
        groups: dict[tuple[int, int], list[int]] = {}
        for index, seen in enumerate(ranks.seen):
            if row.init_key in seen.stepped:
                place = (seen.etp_rank if row.expert else seen.tp_rank) if row.partition_dim >= 0 else 0
                groups.setdefault((place, seen.ep_rank if row.expert_dim >= 0 else 0), []).append(index)
        for holders in groups.values():
            context.exercised([row.host_module] if len(holders) > 1 else [])
            first = ranks.seen[holders[0]]
            for index in holders[1:]:
                other = ranks.seen[index]
                if not torch.equal(first.stepped[row.init_key], other.stepped[row.init_key]):
                    error = relative_error(other.stepped[row.init_key], first.stepped[row.init_key])
                    cause = f"differs from the replica on rank {first.rank} after two steps: ranks drift apart"
                    yield factor_finding("replica", row, cause=cause, error=error, bound=0.0, rank=other.rank)


CHECKS = (
    Check(
        name="two-steps",
        level=Level.PARALLEL,
        proves="Two optimizer steps from B != 0 move every factor as in one process.",
        run=_two_steps,
        needs=("build-model",),
    ),
    Check(
        name="replicas",
        level=Level.PARALLEL,
        proves="After these steps all ranks that hold the same part of a factor hold the same bits.",
        run=_replicas,
        needs=("build-model",),
    ),
)
