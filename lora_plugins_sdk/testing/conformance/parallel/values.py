"""What flows forward and back through the linears: outputs, logits and dX, with the site where a deviation starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import BOUND, features, parallel_ratios
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import Suspects, likely_cause, relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.local_view import microbatches_of, tokens_of
from lora_plugins_sdk.testing.conformance.parallel.ranks import Pair, Ranks
from lora_plugins_sdk.testing.layout import Layout

_REGION = {
    ("dX", SiteKind.COLUMN): "the sum over TP of the input's gradient is missing, partial or doubled (the region)",
    ("dX", SiteKind.ROW): "the gradient of the r-wide product does not reach every rank as it should (the region)",
    ("output", SiteKind.COLUMN): "the r-wide product is not gathered, or a shard's rows of B lie elsewhere (the pack)",
    ("output", SiteKind.ROW): "the sum over TP of the r-wide product is missing or doubled (the region)",
}
_DISAGREE = "ranks disagree where each should compute the same"


def _outputs(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    context.exercised(pair.plan.host_module for pair in ranks.outputs)
    yield from _first(ranks, "output", ranks.outputs)


def _logits(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    context.exercised(plan.host_module for plan in ranks.table.plans)
    full = ranks.alone.logits
    for seen in ranks.seen:
        if seen.pp_rank != layout.pp - 1:
            continue
        if not seen.logits:
            yield Finding(what="logits", rank=seen.rank, cause="this rank of the last stage returned none")
            continue
        local = torch.stack(seen.logits)
        start = seen.tp_rank * local.shape[-1]
        mine = full[microbatches_of(layout, seen, full.shape[0])][:, :, tokens_of(layout, seen, split_over_tp=False)]
        expected = mine[..., start : start + local.shape[-1]]
        actual = local[..., : expected.shape[-1]]
        error = relative_error(actual, expected)
        if not error <= BOUND:
            cause = "see `outputs` for the site where the deviation starts"
            yield Finding(what="logits", rank=seen.rank, error=error, bound=BOUND, cause=cause)
        if local[..., expected.shape[-1] :].any():
            cause = "columns of the vocabulary's padding are not zero: the head's B or its weight has rows for no token"
            yield Finding(what="logits", site=_padded_site(ranks), rank=seen.rank, cause=cause)


def _padded_site(ranks: Ranks) -> str | None:
    """The adapted linear whose output TP pads."""
    padded = [plan for plan in ranks.table.plans if getattr(plan.site.pack, "pad", False) and not plan.site.embedding]
    return padded[0].host_module if padded else None


def _input_gradients(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    context.exercised(pair.plan.host_module for pair in ranks.input_grads)
    late = {(pair.seen.rank, pair.plan.host_module) for pair in ranks.output_grads if pair.wrong}
    wrong = [pair for pair in ranks.input_grads if pair.wrong]
    own = [pair for pair in wrong if (pair.seen.rank, pair.plan.host_module) not in late]
    # Without a site of its own, the fault lies between two sites: the last one that is wrong is nearest to it.
    yield from _first(ranks, "dX", (own or wrong)[::-1], len(wrong))


def _first(ranks: Ranks, what: str, pairs: Sequence[Pair], total: int | None = None) -> Iterator[Finding]:
    """Findings of the first site that is wrong; what comes after it follows from it."""
    wrong = [pair for pair in pairs if pair.wrong]
    if not wrong:
        return
    site = wrong[0].plan.host_module
    here = [pair for pair in wrong if pair.plan.host_module == site]
    others = (len(wrong) if total is None else total) - len(here)
    follow = f" ({others} tensors of other sites differ too, most likely in consequence)" if others else ""
    for pair in here:
        same = [one for one in pairs if (one.plan, one.projection) == (pair.plan, pair.projection)]
        peers = set() if pair.plan.site.experts else {seen.rank for seen in ranks.tp_peers(pair.seen)}
        suspects = Suspects(
            peers=[features(one.actual) for one in same if one.seen.rank in peers],
            ratios=parallel_ratios(ranks.layout),
            fallback=_REGION.get((what, pair.plan.site.kind), _DISAGREE),
        )
        yield Finding(
            what=what,
            site=site,
            projection=pair.projection,
            rank=pair.seen.rank,
            error=pair.error,
            bound=BOUND,
            cause=likely_cause(features(pair.actual), features(pair.expected), suspects) + follow,
        )


_NEEDS = ("build-model",)

CHECKS = (
    Check(
        name="outputs",
        level=Level.PARALLEL,
        proves="Every rank's part of every adapted projection's output is that of one process.",
        run=_outputs,
        needs=_NEEDS,
    ),
    Check(
        name="logits",
        level=Level.PARALLEL,
        proves="The logits are those of one process, and zero for the padding of the vocabulary.",
        run=_logits,
        needs=_NEEDS,
    ),
    Check(
        name="input-gradients",
        level=Level.PARALLEL,
        proves="dX of every adapted linear is complete on every rank and that of one process.",
        run=_input_gradients,
        needs=_NEEDS,
    ),
)
