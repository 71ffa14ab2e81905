"""Exports do not depend on the layout, and every rank gets all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import BOUND, EXACT
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import Suspects, likely_cause, relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.parallel.ranks import Ranks
from lora_plugins_sdk.testing.conformance.problem import make_problem, peft_adapter
from lora_plugins_sdk.testing.layout import Layout

_WORDS = {
    "initial": (
        "exported initial tensor",
        "drawn per rank or from local sizes, not from the seed and the HF name alone",
    ),
    "imported": ("re-exported tensor", "shards are cut or joined otherwise than rows of the HF tensor"),
    "exported": (
        "exported tensor",
        "see `two-steps`; if that is right, the export is old, or shards are joined otherwise",
    ),
}


def _initial(context: Context, layout: Layout) -> Iterator[Finding]:
    yield from _compare(context, layout, "initial", Ranks.of(context, layout).alone.initial, EXACT)


def _imported(context: Context, layout: Layout) -> Iterator[Finding]:
    subject = context.subject
    saved = peft_adapter(subject, make_problem(subject).factors)
    yield from _compare(context, layout, "imported", saved.tensors, EXACT)


def _trained(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = Ranks.of(context, layout)
    expected: dict[str, Tensor] = {}
    for row in ranks.table.rows:
        expected |= context.subject.selected.export_tensor(row, ranks.alone.stepped[row.init_key])
    yield from _compare(context, layout, "exported", expected, BOUND)
    first = ranks.seen[0]
    for seen in ranks.seen[1:]:
        unlike = [name for name in first.exported if not torch.equal(first.exported[name], _get(seen.exported, name))]
        for name in unlike:
            cause = f"{name} differs from the export of rank {first.rank}: engines would serve different policies"
            yield Finding(what="exported tensor", rank=seen.rank, cause=cause)


def _get(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors.get(name, torch.empty(0))


def _compare(
    context: Context, layout: Layout, which: str, expected: Mapping[str, Tensor], bound: float
) -> Iterator[Finding]:
    """One of an observation's exports against full tensors by PEFT name."""
    ranks = Ranks.of(context, layout)
    what, fallback = _WORDS[which]
    for row in ranks.table.rows:
        context.exercised([row.host_module])
        names = context.subject.selected.export_tensor(row, torch.empty(row.full_shape, device="meta"))
        for seen in ranks.seen:
            tensors = getattr(seen, which)
            for name in names:
                if name not in tensors:
                    yield factor_finding(
                        what, row, rank=seen.rank, cause=f"{name} is missing: skipped, or not gathered"
                    )
                    continue
                error = relative_error(tensors[name], expected[name])
                if not error <= bound:
                    others = {other: value for other, value in expected.items() if other != name}
                    suspects = Suspects(others=others, fallback=fallback)
                    cause = likely_cause(tensors[name], expected[name], suspects)
                    yield factor_finding(what, row, cause=cause, error=error, bound=bound, rank=seen.rank)
    for seen in ranks.seen:
        for name in sorted(getattr(seen, which).keys() - expected.keys()):
            yield Finding(what=what, rank=seen.rank, cause=f"{name} belongs to no factor")


CHECKS = (
    Check(
        name="initial-export",
        level=Level.PARALLEL,
        proves="The initial adapter is bit for bit that of one process, on every rank.",
        run=_initial,
        needs=("build-model",),
    ),
    Check(
        name="import-export",
        level=Level.PARALLEL,
        proves="An imported adapter is exported bit for bit, on every rank.",
        run=_imported,
        needs=("build-model",),
    ),
    Check(
        name="trained-export",
        level=Level.PARALLEL,
        proves="The trained adapter's export is that of one process, and the same bits on every rank.",
        run=_trained,
        needs=("build-model",),
    ),
)
