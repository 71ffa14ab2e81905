"""Every factor's gradient on every rank, and the norm of the whole counted once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lora_plugins_sdk.shards import shard
from lora_plugins_sdk.table import ParamRow
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import BOUND, parallel_ratios, same_shape
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import Suspects, likely_cause, relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.observation import RankObservation
from lora_plugins_sdk.testing.conformance.parallel.ranks import Ranks
from lora_plugins_sdk.testing.layout import Layout

_FOLLOWS = "what reaches the site is wrong already: `outputs` or `input-gradients` names where that starts"


def _gradients(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    around = [*ranks.outputs, *ranks.output_grads]
    late = {(pair.seen.rank, pair.plan.host_module) for pair in around if pair.wrong}
    late_experts = {pair.plan.host_module for pair in around if pair.wrong and pair.plan.site.experts}
    own, followers = [], []
    for row in ranks.table.rows:
        holders = [seen for seen in ranks.seen if row.init_key in seen.grads]
        context.exercised([row.host_module] if holders else [])
        if not holders:
            own.append(factor_finding("gradient", row, cause="no rank has this factor"))
        for seen in holders:
            found = _wrong(ranks, row, seen)
            if found is not None:
                follows = row.host_module in late_experts or (seen.rank, row.host_module) in late
                (followers if follows else own).append(found)
    # Where what comes in from outside is wrong already, a wrong gradient of the factor says nothing about the factor.
    yield from own or [replace(one, cause=_FOLLOWS) for one in followers]


def _wrong(ranks: Ranks, row: ParamRow, seen: RankObservation) -> Finding | None:
    actual, expected = seen.grads[row.init_key], shard(row, ranks.alone.grads[row.init_key], seen)
    error = relative_error(actual, expected)
    if error <= BOUND:
        return None
    whole = row.partition_dim == -1 and row.expert_dim == -1
    suspects = Suspects(
        peers=[peer.grads[row.init_key] for peer in ranks.holders_of_shares(row, seen)],
        group="tp" if not row.expert else "etp_ep" if row.full_shape[0] == 1 else "etp",
        ratios=parallel_ratios(ranks.layout),
        others=same_shape(row, ranks.table, ranks.alone.grads) if whole else {},
    )
    cause = likely_cause(actual, expected, suspects)
    return factor_finding("gradient", row, cause=cause, error=error, bound=BOUND, rank=seen.rank)


def _norm(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    context.exercised(plan.host_module for plan in ranks.table.plans)
    marked = list(_marks(ranks))
    if marked:
        yield from marked
        return
    expected = ranks.alone.grad_norm
    for seen in ranks.seen:
        error = abs(seen.grad_norm / expected - 1)
        if not error <= BOUND:
            cause = f"{seen.grad_norm:.6g} instead of {expected:.6g}, though each factor counts once: see `gradients`"
            yield Finding(what="gradient norm", rank=seen.rank, error=error, bound=BOUND, cause=cause)


def _marks(ranks: Ranks) -> Iterator[Finding]:
    """A factor that ranks hold parts of counts on each, a replica on the first of its group."""
    for row in ranks.table.rows:
        for seen in ranks.seen:
            counted = seen.counted.get(row.init_key)
            wanted = row.partition_dim >= 0 or (seen.etp_rank if row.expert else seen.tp_rank) == 0
            wanted = wanted and (not row.expert or row.expert_dim >= 0 or seen.ep_rank == 0)
            if counted is None or counted == wanted:
                continue
            mark = "marked `shared`" if row.expert else "marked tensor_model_parallel"
            cause = f"is counted more than once: {'not ' * row.expert}{mark}, though several ranks hold all of it"
            if wanted:
                cause = f"is not counted: {'not ' * (not row.expert)}{mark}, though this rank holds a part of its own"
            yield factor_finding("gradient norm", row, cause=cause, rank=seen.rank)


CHECKS = (
    Check(
        name="gradients",
        level=Level.PARALLEL,
        proves="After all reductions every rank's part of every factor's gradient is that of one process.",
        run=_gradients,
        needs=("build-model",),
    ),
    Check(
        name="grad-norm",
        level=Level.PARALLEL,
        proves="By the host's own marks each factor counts once in the gradient norm.",
        run=_norm,
        needs=("build-model",),
    ),
)
