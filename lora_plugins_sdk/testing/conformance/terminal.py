"""The summary of one suite from the records that its tests left, wherever they ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_plugins_sdk.testing.conformance.check import Level, Result
from lora_plugins_sdk.testing.conformance.coverage import coverage_of
from lora_plugins_sdk.testing.conformance.layouts import EXPERT_LAYOUTS, LAYOUTS
from lora_plugins_sdk.testing.conformance.report import not_run_lines, summary_lines, unseen_lines
from lora_plugins_sdk.testing.conformance.run import cases


def suite_lines(records: Sequence[Mapping[str, Any]], highest: int) -> list[str]:
    """Lines to print.

    Args:
        records: as `PluginConformance` leaves them, of one suite.
        highest: level up to which cases were collected.
    """
    results = list(_results(records))
    sites = records[0]["sites"]
    asked = [level for level in Level if level <= highest]
    return [
        *coverage_lines(sites, results),
        "",
        *summary_lines(results),
        *not_run_lines(asked),
        *unseen_lines(sites, results),
    ]


def coverage_lines(sites: Mapping[str, Sequence[str]], results: Sequence[Result]) -> list[str]:
    """The table of checks and sites in aligned columns."""
    header, body = coverage_of(sites, results).table()
    widths = [max(len(row[index]) for row in [header, *body]) for index in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *body]
    ]


def _results(records: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    layouts = dict.fromkeys((*LAYOUTS, *EXPERT_LAYOUTS))
    known = {(level, case.id): case for level in Level for case in cases(level, layouts)}
    order = {key: index for index, key in enumerate(known)}
    found = {}
    for record in records:
        one = record["result"]
        name = one["check"] if one["layout"] is None else f"{one['layout']}-{one['check']}"
        key = (Level(one["level"]), name)
        found[key] = Result.from_record(one, known[key])
    return iter(found[key] for key in sorted(found, key=order.__getitem__))
