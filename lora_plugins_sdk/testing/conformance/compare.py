"""Comparisons that name what differs; each records the sites that it measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParameterTable, ParamRow
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import Suspects, likely_cause, relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding

BOUND = 1e-4
"""Relative to the largest entry: float32 rounding is a tenth of it at most, a fault a hundred times as much."""

EXACT = 0.0


def scale_ratios(lora: LoraConfig) -> dict[float, str]:
    """What it means when a delta, or a gradient, is off by one of these factors."""
    alpha, rank, scale = lora.alpha, lora.rank, lora.scale
    ratios = {
        1 / alpha: "alpha was left out of the scale",
        1 / scale: f"the scale ({scale:g}) was not applied",
        scale: f"the scale ({scale:g}) was applied twice",
        float(rank): "the scale was not divided by the rank",
        math.sqrt(rank): "the rank-stabilised scale alpha / sqrt(rank) was used",
        1 / math.sqrt(rank): "the rank-stabilised scale was ignored",
        -1.0: "the sign is wrong",
    }
    twice = "the delta was added twice (a forward patched twice)"
    ratios[2.0] = f"{ratios[2.0]}, or {twice}" if 2.0 in ratios else twice  # it may be sqrt(rank) too
    return ratios


def parallel_ratios(facts: RunFacts) -> dict[float, str]:
    """What it means when a gradient is off by one of these factors in a parallel run."""
    ratios = {}
    sizes = {"expert DP": facts.expert_dp, "ETP": facts.etp, "EP": facts.ep} if facts.experts_apart else {}
    for name, size in (sizes | {"CP": facts.cp, "DP": facts.dp, "TP": facts.tp}).items():
        if size > 1:
            ratios[float(size)] = f"summed over the {size} {name} ranks although each holds it complete"
            ratios[1 / size] = f"the sum over the {size} {name} ranks is missing, or an average was taken twice"
    if facts.tp > 1:
        ratios[float(facts.tp)] += " (a wrong tag: the gradient-sum group should be none)"
    return ratios


def compare_factors(
    context: Context,
    what: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    table: ParameterTable,
    *,
    bound: float = BOUND,
    ratios: Mapping[float, str] | None = None,
    fallback: str | None = None,
    skip: Collection[str] = (),
) -> Iterator[Finding]:
    """Full factors (or their gradients) by `ParamRow.init_key`, one Finding for each that differs.

    Args:
        context: records the sites.
        what: the quantity.
        actual, expected: by `ParamRow.init_key`.
        table: gives the factors.
        bound: largest relative error.
        ratios, fallback: see `Suspects`.
        skip: HF modules that something wrong reaches from outside, so that their factors cannot be judged.
    """
    for row in table.rows:
        context.exercised([row.host_module])
        if row.hf_module in skip:
            continue
        if row.init_key not in actual:
            yield factor_finding(what, row, cause="is missing", bound=bound)
            continue
        error = relative_error(actual[row.init_key], expected[row.init_key])
        if not error <= bound:
            suspects = Suspects(ratios=ratios or {}, others=same_shape(row, table, expected), fallback=fallback)
            cause = likely_cause(actual[row.init_key], expected[row.init_key], suspects)
            yield factor_finding(what, row, cause=cause, error=error, bound=bound)


def same_shape(row: ParamRow, table: ParameterTable, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of the other factors that could be mixed up with this one."""
    return {
        other.init_key: values[other.init_key]
        for other in table.rows
        if other.full_shape == row.full_shape and other.init_key != row.init_key and other.init_key in values
    }


def compare_logits(
    what: str,
    actual: Tensor,
    expected: Tensor,
    cause: str,
    *,
    bound: float = BOUND,
    ratios: Mapping[float, str] | None = None,
) -> Iterator[Finding]:
    """Whole-model outputs, one Finding at most.

    Args:
        what: the quantity.
        actual: measured.
        expected: what it must be.
        cause: the likely cause where no pattern is recognised.
        bound: largest relative error, or EXACT.
        ratios: see `Suspects`.
    """
    error = relative_error(actual, expected)
    if not error <= bound:
        pattern = likely_cause(actual, expected, Suspects(ratios=ratios or {}, fallback=""))
        yield Finding(what=what, cause=f"{pattern}; {cause}" if pattern else cause, error=error, bound=bound)


def compare_outputs(
    context: Context,
    what: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    table: ParameterTable,
    *,
    backward: bool = False,
    deltas: Mapping[str, Tensor] | None = None,
    fallback: str | None = None,
    bound: float = BOUND,
) -> Iterator[Finding]:
    """What leaves (or, backward, enters) each projection of a single process; only the first site that differs.

    Experts, routed or stacked, and what transformers' module does not do alone (`by_weight`) are left out: transformers
    shows no outputs of theirs. A deviation travels on: what
    differs after the first site follows from it.

    Args:
        context: records the sites.
        what: the quantity.
        actual, expected: by HF module, `[..., out]`.
        table: gives the order of the forward pass.
        backward: the quantity travels from the last site to the first.
        deltas: the adapter's share of `expected`; a pattern shows in it better than under the base's output.
        fallback: what to say when no pattern is recognised.
        bound: largest relative error.
    """
    wrong = []
    plans = [
        plan
        for plan in table.plans
        if not plan.site.experts
        and not any(row.stack for row in plan.rows)
        and not any(one.by_weight for one in plan.site.projections)
    ]
    for plan in plans[::-1] if backward else plans:
        context.exercised([plan.host_module])
        modules = dict.fromkeys(row.hf_module for row in plan.rows)
        errors = {name: relative_error(actual[name], expected[name]) for name in modules}
        bad = {name: error for name, error in errors.items() if not error <= bound}
        if bad:
            wrong.append((plan, bad))
    for plan, bad in wrong[:1]:
        follow = f" ({len(wrong) - 1} sites after it differ too, which follows)" if len(wrong) > 1 else ""
        later = plans.index(plan) + 1
        # What flows back into a site comes out of the next one: if that got the right gradient, its own dX is wrong.
        blamed = plans[later] if backward and later < len(plans) else plan
        for name, error in bad.items():
            base = 0.0 if deltas is None else expected[name] - deltas[name]
            others = expected if deltas is None else deltas
            suspects = Suspects(
                ratios=scale_ratios(table.lora),
                others={other: features(value) for other, value in others.items() if other != name},
                fallback=fallback,
            )
            cause = likely_cause(features(actual[name] - base), features(expected[name] - base), suspects)
            if blamed is not plan:
                cause = f"what it sends back reaches {name} wrong (no dX of the branch, or another one); there: {cause}"
            yield Finding(
                what="dX" if blamed is not plan else what,
                site=blamed.host_module,
                projection=name if blamed is plan else None,
                error=error,
                bound=bound,
                cause=cause + follow,
            )


def features(tensor: Tensor) -> Tensor:
    """`[..., width]` as `[width, everything else]`, so that permuted rows are permuted features."""
    return tensor.flatten(0, -2).t()
