"""Reports: a table on the terminal and a JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A figure to reach.

    Args:
        what: what is measured, in words.
        bound: the goal.
        measured: the figure.
        at_least: whether more is better.
    """

    what: str
    bound: float
    measured: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure reaches the goal."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def write_report(path: Path, *, given: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], goals: list[Goal]) -> None:
    """Print the rows and goals and write them, with the machine, as JSON.

    Args:
        path: the JSON file.
        given: what the benchmark was run with.
        rows: one mapping a row, all with the same keys.
        goals: the goals with their figures.
    """
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)
    judged = [{**asdict(goal), "met": goal.met} for goal in goals]
    print_goals(judged)
    body = {"machine": _machine(), "given": given, "rows": rows, "goals": judged}
    path.write_text(json.dumps(body, indent=1, default=str) + "\n")
    print(f"written: {path}")


def print_goals(goals: Sequence[Mapping[str, Any]]) -> None:
    """One line a goal, as in the JSON file."""
    for goal in goals:
        sign = ">=" if goal["at_least"] else "<="
        verdict = "met   " if goal["met"] else "MISSED"
        print(f"{verdict} {goal['what']}: {goal['measured']:.3g} (goal {sign} {goal['bound']:.3g})")


def _machine() -> dict[str, Any]:
    cpu = next((line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")), "")
    return {
        "cpu": cpu.partition(":")[2].strip() or platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
