"""``reward.png``: reward over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMOOTHING_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCurve:
    """One run's reward.

    Args:
        label: name in the legend.
        rows: rows of its metrics.
        held_out: mean held-out reward by number of finished steps (0 is before training).
    """

    label: str
    rows: Sequence[Mapping[str, Any]]
    held_out: Mapping[int, float]


def running_mean(values: Sequence[float], width: int = SMOOTHING_STEPS) -> list[float]:
    """Mean of each value and up to `width` - 1 before it."""
    return [sum(values[max(0, end - width) : end]) / (end - max(0, end - width)) for end in range(1, len(values) + 1)]


def draw_rewards(curves: Sequence[RewardCurve], path: Path) -> None:
    """Write a PNG file: training reward (thin), its running mean over 10 steps (thick), held-out reward (dots)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        color = f"C{index % 10}"
        points = [(row["step"] + 1, row["reward"]) for row in curve.rows if row["reward"] is not None]
        steps, rewards = [point[0] for point in points], [point[1] for point in points]
        axes.plot(steps, rewards, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, running_mean(rewards), color=color, linewidth=2, label=curve.label)
        if curve.held_out:
            axes.plot(
                *zip(*sorted(curve.held_out.items()), strict=True), "o", color=color, label=f"{curve.label}, held out"
            )
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
