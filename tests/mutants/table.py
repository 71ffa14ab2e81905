"""The table of a hunt: mutant, whose fault it imitates, which check killed it, what it said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mutants.hunt import Verdict

_WIDEST = 110
_COLUMNS = ("MUTANT", "IMITATES", "KILLED BY", "FINDING")


def row(verdict: Verdict) -> dict[str, Any]:
    """A verdict in built-in types, which travel between processes."""
    mutant = verdict.mutant
    finding = str(verdict.by).splitlines()[0] if verdict.killed else "-"
    cells = (mutant.name, mutant.imitates, mutant.case if verdict.killed else f"LIVES ({mutant.case})", finding)
    return {"cells": [cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 3]}..." for cell in cells]} | {
        "killed": verdict.killed,
        "seconds": verdict.result.seconds,
    }


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
