"""The layout runs at all: every rank ends in time, and every adapted linear is called where it lives."""

from __future__ import annotations

from collections.abc import Iterator

from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.observation import observed
from lora_plugins_sdk.testing.layout import Layout


def _completes(context: Context, layout: Layout) -> Iterator[Finding]:
    ranks = observed(context, layout)
    for plan in context.subject.table(layout).plans:
        called = [seen for seen in ranks if plan.host_module in seen.captured.outputs]
        stages = {seen.pp_rank for seen in called}
        if len(stages) != 1 or len(called) * layout.pp != len(ranks):
            where = ", ".join(str(seen.rank) for seen in called) or "none"
            cause = f"called on ranks {where}, not on all ranks of one pipeline stage: no adapter there, or two"
            yield Finding(what="adapted linear", site=plan.host_module, cause=cause)
        else:
            context.exercised([plan.host_module])


CHECKS = (
    Check(
        name="completes",
        level=Level.PARALLEL,
        proves="Every rank ends within the time, and every adapted linear is called on one pipeline stage.",
        run=_completes,
        needs=("build-model",),
    ),
)
