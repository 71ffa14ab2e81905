"""`lora-grpo plot`: finished or running runs, as a picture and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lora_harness.report.curves import RewardCurve, draw_rewards
from lora_harness.report.display import tokens_per_second
from lora_harness.report.metrics_file import read_metrics
from lora_harness.report.summary import FILE_NAME as SUMMARY_NAME
from lora_harness.report.summary import Summary

MAX_ROWS = 12
COLUMNS = ("reward", "eval_reward", "kl", "entropy", "clip_share", "grad_norm", "logprob_gap_max")


def plot_runs(paths: Sequence[Path], picture: Path, console: Console) -> None:
    """Draw the reward of one or more runs into one picture, and print a table for each.

    Args:
        paths: output directories of runs, or ``metrics.jsonl`` files.
        picture: PNG file to write.
        console: where tables are printed.

    Raises:
        LoraError: a path without readable metrics. Nothing is written then.
    """
    curves = [read_curve(path) for path in paths]
    draw_rewards(curves, picture)
    for curve in curves:
        console.print(step_table(curve))
        if {0, curve.rows[-1]["step"] + 1} <= curve.held_out.keys():
            before, after = curve.held_out[0], curve.held_out[curve.rows[-1]["step"] + 1]
            console.print(f"held-out reward {before:.3f} -> {after:.3f}", highlight=False)
    console.print(f"plot: {picture}", highlight=False, soft_wrap=True)


def read_curve(path: Path) -> RewardCurve:
    """The reward curve of a run; held-out rewards before and after come from its summary, once there is one."""
    rows = read_metrics(path)
    directory = path if path.is_dir() else path.parent
    held_out = {row["step"] + 1: row["eval_reward"] for row in rows if "eval_reward" in row}
    if (directory / SUMMARY_NAME).is_file():
        summary = Summary.read(directory)
        held_out |= {0: summary.reward_before, summary.steps: summary.reward_after}
    return RewardCurve(label=directory.resolve().name, rows=rows, held_out=held_out)


def step_table(curve: RewardCurve) -> Table:
    """At most 12 steps of a run, evenly spaced, with the first and the last."""
    table = Table(title=curve.label)
    names = [name for name in COLUMNS if any(name in row for row in curve.rows)]
    for name in ("step", *names, "tokens", "tokens/s"):
        table.add_column(name, justify="right")
    count = min(MAX_ROWS, len(curve.rows))
    places = sorted({round(k * (len(curve.rows) - 1) / max(1, count - 1)) for k in range(count)})
    for row in (curve.rows[place] for place in places):
        rate = f"{tokens_per_second(row):,.0f}" if "tokens" in row else ""
        table.add_row(str(row["step"] + 1), *(_cell(row, name) for name in names), _cell(row, "tokens"), rate)
    return table


def _cell(row: Any, name: str) -> str:
    if name not in row:
        return ""
    value = row[name]
    return "not finite" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
