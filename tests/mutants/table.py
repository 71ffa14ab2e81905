"""The table of a hunt: mutant, whose fault it imitates, which check killed it, what it said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_plugins_sdk.testing.conformance import Finding
from mutants.hunt import Verdict

_WIDEST = 150
_COLUMNS = ("MUTANT", "IMITATES", "KILLED BY", "FINDING")


def row(verdict: Verdict) -> dict[str, Any]:
    """A verdict in built-in types, which travel between processes."""
    mutant = verdict.mutant
    by = mutant.case if verdict.killed else f"LIVES ({mutant.case})"
    cells = [mutant.name, mutant.imitates, by, _summary(verdict.by, mutant.words) if verdict.killed else "-"]
    return {"cells": cells, "killed": verdict.killed, "seconds": verdict.result.seconds}


def _summary(finding: Finding | None, words: str) -> str:
    """One line: the place, then the telling line of the cause as far as it fits."""
    assert finding is not None, "a killed mutant has a finding"
    place = " ".join(part for part in (finding.what, finding.site, finding.factor) if part)
    causes = finding.cause.splitlines()
    line = f"{place}: {next((one for one in causes if words in one), causes[0])}"
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table in aligned columns, then the count."""
    table = [_COLUMNS, *(one["cells"] for one in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_COLUMNS))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table]
    faults = {one["cells"][0] for one in rows}
    alive = {one["cells"][0] for one in rows if not one["killed"]}
    seconds = sum(one["seconds"] for one in rows)
    return [
        *body,
        "",
        f"{len(faults) - len(alive)} of {len(faults)} mutants killed ({len(rows)} cases, {seconds:.0f} s)",
    ]
