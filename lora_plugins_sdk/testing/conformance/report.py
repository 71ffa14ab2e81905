"""What a run of the kit says in the end, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lora_plugins_sdk.testing.conformance.catalogue import NOT_COVERED
from lora_plugins_sdk.testing.conformance.check import Level, Result, Status
from lora_plugins_sdk.testing.conformance.coverage import coverage_of

SHOWN_FINDINGS = 6


def failure_text(result: Result) -> str:
    """Why a case is no success: what it should prove, and the first findings."""
    lines = [f"{result.case.id}: {result.status}", f"  should hold: {result.case.check.proves}"]
    if result.status is Status.UNEXPECTED_PASS:
        lines.append(f"  remove the opt-out, it hides nothing: {result.reason}")
    lines += [f"  {one}" for one in result.findings[:SHOWN_FINDINGS]]
    more = len(result.findings) - SHOWN_FINDINGS
    return "\n".join([*lines, f"  ... and {more} more"] if more > 0 else lines)


def summary_lines(results: Sequence[Result]) -> list[str]:
    """Counts, what was not run and why, and what the plugin itself says it lacks."""
    counts = Counter(one.status for one in results)
    seconds = {level: sum(one.seconds for one in results if one.case.check.level is level) for level in Level}
    lines = [
        ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
        + " ("
        + ", ".join(f"L{int(level)} {time:.1f} s" for level, time in seconds.items() if time)
        + ")"
    ]
    lines += [f"NOT RUN {one.case.id}: {one.reason}" for one in results if one.status is Status.NOT_RUN]
    lacking: dict[str, list[str]] = {}
    for one in results:
        if one.status is Status.LACKING:
            lacking.setdefault(one.reason, []).append(one.case.id)
    lines += [f"LACKING {reason} ({len(ids)} cases: {', '.join(ids[:3])} ...)" for reason, ids in lacking.items()]
    return lines


def unseen_lines(sites: Mapping[str, Sequence[str]], results: Iterable[Result]) -> list[str]:
    """One line for each declared site that no check measured."""
    return [f"NOT EXERCISED {path}: no check measured it" for path in coverage_of(sites, results).unseen()]


def not_run_lines(levels: Iterable[Level]) -> list[str]:
    """One line for each level that nobody asked for, and for what no level covers."""
    asked = set(levels)
    return [
        *(f"NOT RUN {level.title}: not asked for" for level in Level if level not in asked),
        *(f"NOT COVERED {name}: {reason}" for name, reason in NOT_COVERED.items()),
    ]


def as_json(sites: Mapping[str, Sequence[str]], results: Sequence[Result], levels: Iterable[Level]) -> dict[str, Any]:
    """The whole report."""
    coverage = coverage_of(sites, results)
    return {
        "conforms": all(one.status.good for one in results),
        "cases": [one.record() for one in results],
        "coverage": {
            "sites": dict(coverage.sites),
            "checks": {
                name: dict(zip(coverage.sites, counts, strict=True)) for name, (_, counts) in coverage.rows.items()
            },
            "not_exercised": coverage.unseen(),
        },
        "not_run": [one.case.id for one in results if one.status is Status.NOT_RUN],
        "not_covered": dict(NOT_COVERED),
        "levels_not_asked_for": [int(level) for level in Level if level not in set(levels)],
    }
