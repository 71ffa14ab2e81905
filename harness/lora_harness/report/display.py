"""What a run shows while it goes: one line a step, and a progress bar where the output is a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def tokens_per_second(row: Mapping[str, float | int]) -> float:
    """Drawn tokens over the seconds of all phases of a step."""
    seconds = sum(value for name, value in row.items() if name.startswith("seconds_"))
    return row["tokens"] / seconds if seconds else 0.0


def step_line(row: Mapping[str, float | int], steps: int) -> str:
    """One step in one line; `row` is a flat row of metrics."""
    width = len(str(steps))
    seconds = sum(value for name, value in row.items() if name.startswith("seconds_"))
    parts = [
        f"step {row['step'] + 1:>{width}}/{steps}",
        f"reward {row['reward']:.3f}",
        f"kl {row['kl']:.4f}",
        f"entropy {row['entropy']:.3f}",
        f"grad {row['grad_norm']:.3f}",
        f"gap {row['logprob_gap_max']:.1e}",
        f"{tokens_per_second(row):,.0f} tok/s",
        f"{seconds:.1f} s",
    ]
    if "eval_reward" in row:
        parts.insert(2, f"held out {row['eval_reward']:.3f}")
    if row["syncs_skipped"]:
        parts.append("sync skipped")
    return "  ".join(parts)


class RunDisplay:
    """Shows the steps of a run on a console; `done` of them were made before."""

    def __init__(self, console: Console, steps: int, *, done: int = 0) -> None:
        self._console = console
        self._steps = steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.3f}  {task.fields[rate]:,.0f} tok/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, reward=0.0, rate=0.0)

    def __enter__(self) -> RunDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, row: Mapping[str, float | int]) -> None:
        """Show a finished step; `row` is a flat row of metrics."""
        self.say(step_line(row, self._steps))
        self._bar.update(self._task, advance=1, reward=row["reward"], rate=tokens_per_second(row))
