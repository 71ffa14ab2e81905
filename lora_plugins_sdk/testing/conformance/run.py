"""Run cases: the status of one, strict opt-outs included."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from lora_plugins_sdk.testing.conformance.around import entered
from lora_plugins_sdk.testing.conformance.catalogue import checks
from lora_plugins_sdk.testing.conformance.check import Case, Level, Result, Status
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.layouts import LAYOUTS, needed_capabilities
from lora_plugins_sdk.testing.conformance.repeats import Repeats
from lora_plugins_sdk.testing.failure import WorldError
from lora_plugins_sdk.testing.layout import Layout


def cases(level: Level, layouts: Iterable[Layout] = LAYOUTS) -> list[Case]:
    """Every case of one level, layouts together: a layout's world is started once for all its checks.

    Args:
        level: which.
        layouts: those of level PARALLEL, as `layouts_of` gives them.
    """
    found = checks(level)
    if level is not Level.PARALLEL:
        return [Case(check=one, needs=one.needs) for one in found]
    return [
        Case(check=one, layout=layout, needs=one.needs + needed_capabilities(layout))
        for layout in layouts
        for one in found
    ]


def run_cases(context: Context, wanted: Iterable[Case]) -> Iterator[Result]:
    """Each case's result, as it comes."""
    for case in wanted:
        yield run_case(context, case)


def run_case(context: Context, case: Case) -> Result:
    """Measure one case.

    A plugin that lacks a needed capability must fail it: a pass is an error, since the opt-out then hides something.
    """
    check = case.check
    missing = check.unavailable(context) if check.unavailable is not None else None
    if missing is not None:
        return Result(case=case, status=Status.NOT_RUN, reason=missing)
    context.sites.clear()
    lacks = dict(context.subject.lacks)
    reasons = [f"{name}: {lacks[name]}" for name in case.needs if name in lacks]
    start = time.perf_counter()
    # What fails as declared is not shown: no other case can refer to it.
    findings = _measure(context, case, Repeats() if reasons else context.repeats)
    status = Status.FAILED if findings else Status.PASSED
    if reasons:
        status = Status.LACKING if findings else Status.UNEXPECTED_PASS
    return Result(
        case=case,
        status=status,
        findings=tuple(findings),
        reason="; ".join(reasons),
        seconds=time.perf_counter() - start,
        sites=frozenset(context.sites),
    )


def _measure(context: Context, case: Case, repeats: Repeats) -> list[Finding]:
    try:
        # Ranks enter `around` themselves; this process then only compares, against what is right.
        with entered(context.around if case.check.level is Level.STATIC else None):
            return case.measure(context)
    except WorldError as error:
        return [Finding(what="world", cause=repeats.text(error, case.id), rank=error.first)]
    except Exception as error:
        return [Finding(what="error", cause=repeats.text(error, case.id))]
