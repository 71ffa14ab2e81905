"""Everything a run writes and shows, except the adapter itself."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from lora_harness.config import TrainConfig, dump_config
from lora_harness.parity import GapReport
from lora_harness.report.curves import RewardCurve, draw_rewards
from lora_harness.report.display import RunDisplay
from lora_harness.report.metrics_file import FILE_NAME, MetricsWriter, flatten, keep_rows
from lora_harness.report.summary import Summary
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.staging import writable

PLOT_NAME = "reward.png"
# What every row of metrics.jsonl has.
REQUIRED = {
    "step",
    "reward",
    "kl",
    "entropy",
    "clip_share",
    "grad_norm",
    "logprob_gap_mean",
    "logprob_gap_max",
    "tokens",
    "bytes_synced",
    "syncs_skipped",
}


def refuse_used_output(output: Path) -> None:
    """Raise a `LoraError` when `output` holds an earlier run: its rows must not be mixed with another's.

    A run that ended before its first step was finished left nothing to mix; its directory may be used again.
    """
    from lora_harness.checkpoint import CheckpointDirectory

    if output.exists() and not output.is_dir():
        raise LoraError(f"output = {str(output)!r}", reason="is a file", cure="give a directory")
    checkpoints = CheckpointDirectory(output).steps()
    if checkpoints or ((output / FILE_NAME).exists() and (output / FILE_NAME).stat().st_size):
        other = "choose another directory (--set output=DIR), or remove this one"
        raise LoraError(
            f"output = {str(output)!r}",
            reason="already holds a run",
            cure=f"continue it with --resume auto, {other}" if checkpoints else other,
        )


class RunReport:
    """Files and display of one run: config.toml, metrics.jsonl, tensorboard/, reward.png, summary.json.

    A context; what was written stays when the run fails, and ``reward.png`` then shows the steps so far.

    Args:
        config: the run's config.
        writes: False on all ranks but one; they write and show nothing.
        resume_at: finished steps of a run to continue in its own directory, whose later rows are dropped; None begins a
            new directory.
        console: where to show the run, standard output by default.

    Raises:
        LoraError: on entering, when the output directory already holds a run, cannot be written, or lacks rows of the
            run to continue.
    """

    def __init__(
        self, config: TrainConfig, *, writes: bool, resume_at: int | None = None, console: Console | None = None
    ) -> None:
        self._config = config
        self._writes = writes
        self._resume_at = resume_at
        self._console = console or Console()
        self._open = ExitStack()
        self._rows: list[dict[str, float | int]] = []
        self._held_out: dict[int, float] = {}
        self._trained_parameters = 0
        self._began = 0.0

    def __enter__(self) -> RunReport:
        if self._writes:
            try:
                with writable(self._config.output):
                    self._enter()
            except BaseException:
                self._open.close()
                raise
        return self

    def _enter(self) -> None:
        from tensorboard.summary import Writer

        output, done, dropped = self._config.output, self._resume_at or 0, 0
        if self._resume_at is None:
            refuse_used_output(output)
            output.mkdir(parents=True, exist_ok=True)
            (output / FILE_NAME).unlink(missing_ok=True)
            shutil.rmtree(output / "tensorboard", ignore_errors=True)
        elif done or (output / FILE_NAME).exists():
            self._rows, dropped = keep_rows(output, done)
            # Written again from the rows that stay: readers would show both curves of the steps that are repeated.
            shutil.rmtree(output / "tensorboard", ignore_errors=True)
        (output / "config.toml").write_text(dump_config(self._config), encoding="utf-8")
        self._metrics = self._open.enter_context(MetricsWriter(output, resumed=self._resume_at is not None))
        self._tensorboard = Writer(str(output / "tensorboard"))
        self._open.callback(self._tensorboard.close)
        self._open.callback(self._draw)
        for row in self._rows:
            self._chart(row)
        self._display = self._open.enter_context(RunDisplay(self._console, self._config.steps, done=done))
        if dropped:
            self._display.say(f"{FILE_NAME}: dropped {dropped} row{'s' * (dropped > 1)} after step {done}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def say(self, text: str) -> None:
        """Show a line."""
        if self._writes:
            self._display.say(text)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the run so far, those before it was resumed included."""
        return time.perf_counter() - self._began

    def sync(self) -> None:
        """Make the rows so far durable: a checkpoint that stands for them is about to be written."""
        if self._writes:
            self._metrics.sync()

    def start(self, *, trained_parameters: int, seconds: float = 0.0) -> None:
        """Called once, before the first evaluation.

        Args:
            trained_parameters: number of adapter parameters.
            seconds: that the run took before it was resumed.
        """
        self._began = time.perf_counter() - seconds
        if not self._writes:
            return
        self._trained_parameters = trained_parameters
        self._display.say(f"training {trained_parameters:,} adapter parameters; output: {self._config.output}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Write and show a finished step.

        Args:
            row: numbers, or tables of numbers, by name; ``step`` counts from 0. `REQUIRED` names must be
                there.
        """
        if not self._writes:
            return
        flat = flatten(row)
        assert flat.keys() >= REQUIRED, f"a row lacks {sorted(REQUIRED - flat.keys())}"
        self._rows.append(flat)
        broken = self._metrics.write(flat)
        self._chart(flat)
        self._display.step(flat)
        if broken:
            self._display.say(f"warning: step {flat['step'] + 1} has values that are not finite: {', '.join(broken)}")

    def finish(self, *, reward_before: float, reward_after: float, worst_gap: GapReport | None = None) -> None:
        """Write the summary and show what changed.

        Args:
            reward_before, reward_after: mean held-out reward before and after training.
            worst_gap: of the step whose worst token was the worst; None when no step was made.
        """
        if not self._writes:
            return
        config = self._config
        self._held_out |= {0: reward_before, config.steps: reward_after}
        for done in (0, config.steps):
            self._tensorboard.add_scalar("eval_reward", self._held_out[done], done)
        gaps = [row["logprob_gap_max"] for row in self._rows]
        if worst_gap is not None:
            self._display.say(f"largest log-prob gap between trainer and engine: {worst_gap}")
        Summary(
            reward_before=reward_before,
            reward_after=reward_after,
            steps=len(self._rows),
            tokens=int(sum(row["tokens"] for row in self._rows)),
            seconds=self.seconds,
            trained_parameters=self._trained_parameters,
            logprob_gap_max=max(gaps) if all(map(math.isfinite, gaps)) else None,
            held_out_prompts=config.eval.count,
            seed=config.seed,
            model=str(config.model.path),
        ).write(config.output)
        self._display.say(
            f"held-out reward {reward_before:.3f} -> {reward_after:.3f} on {config.eval.count} prompts; "
            f"curve: {config.output / PLOT_NAME}, adapter: {config.output / 'adapter'}"
        )

    def _chart(self, row: Mapping[str, float | int]) -> None:
        done = int(row["step"]) + 1
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                self._tensorboard.add_scalar(name, value, done)
        if "eval_reward" in row:
            self._held_out[done] = row["eval_reward"]

    def _draw(self) -> None:
        if self._rows:
            curve = RewardCurve(label=self._config.output.name, rows=self._rows, held_out=self._held_out)
            draw_rewards([curve], self._config.output / PLOT_NAME)
