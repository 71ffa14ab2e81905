"""What a run writes and shows: rows, summary, TensorBoard, curve, and their errors."""

from __future__ import annotations

import io
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lora_harness.config import TrainConfig, parse_config
from lora_harness.report import RunReport, Summary, refuse_used_output
from lora_harness.report.curves import running_mean
from lora_harness.report.metrics_file import MetricsWriter, flatten, read_metrics
from lora_harness.report.plot_runs import plot_runs
from lora_plugins_sdk.errors import LoraError

PNG = b"\x89PNG\r\n\x1a\n"


def make_config(output: Path, steps: int = 3) -> TrainConfig:
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    return parse_config({"model": {"path": "base"}, "task": task, "steps": steps, "output": str(output), "seed": 4})


def make_row(step: int, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "reward": 0.25 * step,
        "kl": 0.01,
        "entropy": 1.5,
        "clip_share": 0.0,
        "grad_norm": 0.5,
        "logprob_gap_mean": 1e-6,
        "logprob_gap_max": 1e-5 * (step + 1),
        "tokens": 100,
        "bytes_synced": 4096,
        "syncs_skipped": 0,
        "seconds": {"rollout": 1.5, "train": 0.5},
    }
    return row | changes


def run(output: Path, rows: list[dict[str, Any]]) -> str:
    """A whole run of `rows`; returns what it showed."""
    shown = io.StringIO()
    with RunReport(make_config(output), writes=True, console=Console(file=shown, width=200)) as report:
        report.start(trained_parameters=1234)
        for row in rows:
            report.step(row)
        report.finish(reward_before=0.3, reward_after=0.9)
    return shown.getvalue()


def test_a_run_leaves_all_its_files(tmp_path):
    output = tmp_path / "run"
    shown = run(output, [make_row(0), make_row(1, eval_reward=0.6), make_row(2)])
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["reward"] == 0.5
    assert rows[0]["seconds_rollout"] == 1.5 and "seconds" not in rows[0]
    assert parse_config(tomllib.loads((output / "config.toml").read_text())) == make_config(output)
    assert (output / "reward.png").read_bytes().startswith(PNG)
    summary = Summary.read(output)
    assert (summary.reward_before, summary.reward_after, summary.steps, summary.tokens) == (0.3, 0.9, 3, 300)
    assert (summary.trained_parameters, summary.seed, summary.logprob_gap_max) == (1234, 4, pytest.approx(3e-5))
    lines = shown.splitlines()
    assert lines[0].startswith("training 1,234 adapter parameters")
    assert lines[1].startswith("step 1/3  reward 0.000") and "50 tok/s" in lines[1]
    assert "held out 0.600" in lines[2] and "held-out reward 0.300 -> 0.900" in lines[4]


def test_tensorboard_has_every_metric_by_finished_step(tmp_path):
    run(tmp_path, [make_row(0), make_row(1, eval_reward=0.6), make_row(2)])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert {"reward", "kl", "logprob_gap_max", "seconds_train", "eval_reward"} <= set(tags) and "step" not in tags
    assert [event.step for event in events.Tensors("reward")] == [1, 2, 3]
    assert [event.step for event in events.Tensors("eval_reward")] == [2, 0, 3]


def test_values_that_are_not_finite_become_null_and_are_named(tmp_path):
    shown = run(tmp_path, [make_row(0, grad_norm=math.nan, logprob_gap_max=math.inf), make_row(1)])
    text = (tmp_path / "metrics.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    assert first["grad_norm"] is None and first["not_finite"] == ["grad_norm", "logprob_gap_max"]
    assert "NaN" not in text and "Infinity" not in text
    assert "warning: step 1 has values that are not finite: grad_norm, logprob_gap_max" in shown
    assert Summary.read(tmp_path).logprob_gap_max is None


def test_a_run_that_fails_leaves_its_rows_and_its_curve(tmp_path):
    with (
        pytest.raises(RuntimeError),
        RunReport(make_config(tmp_path), writes=True, console=Console(quiet=True)) as report,
    ):
        report.start(trained_parameters=1)
        report.step(make_row(0))
        assert len(read_metrics(tmp_path)) == 1  # on disk while the run goes on
        raise RuntimeError
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG) and not (tmp_path / "summary.json").exists()


def test_ranks_that_do_not_write_leave_nothing(tmp_path):
    output = tmp_path / "run"
    with RunReport(make_config(output), writes=False) as report:
        report.start(trained_parameters=1)
        report.step(make_row(0))
        report.finish(reward_before=0.0, reward_after=0.0)
    assert not output.exists()


def test_a_row_without_a_required_metric_is_refused(tmp_path):
    row = make_row(0)
    del row["kl"]
    with pytest.raises(AssertionError, match="a row lacks \\['kl'\\]"):
        run(tmp_path, [row])


def test_an_output_directory_is_used_once(tmp_path):
    output = tmp_path / "run"
    run(output, [make_row(0)])
    before = (output / "metrics.jsonl").read_bytes()
    with pytest.raises(LoraError, match="already holds a run -> choose another directory"):
        run(output, [make_row(0)])
    assert (output / "metrics.jsonl").read_bytes() == before
    refuse_used_output(tmp_path / "fresh")
    checkpoint = output / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(LoraError, match="already holds a run -> continue it with --resume auto, choose another"):
        refuse_used_output(output)
    (tmp_path / "file").write_text("")
    with pytest.raises(LoraError, match="is a file"):
        refuse_used_output(tmp_path / "file")


def test_an_output_without_a_finished_step_is_used_again(tmp_path):
    output = tmp_path / "run"
    with pytest.raises(RuntimeError), RunReport(make_config(output), writes=True):
        raise RuntimeError
    assert (output / "metrics.jsonl").read_bytes() == b""
    run(output, [make_row(0)])
    assert len(read_metrics(output)) == 1


def test_a_terminal_gets_a_progress_bar_with_reward_and_rate(tmp_path):
    shown = io.StringIO()
    console = Console(file=shown, width=160, force_terminal=True, color_system=None, legacy_windows=False)
    with RunReport(make_config(tmp_path), writes=True, console=console) as report:
        report.start(trained_parameters=1)
        report.step(make_row(2))
    assert "1/3" in shown.getvalue() and "reward 0.500  50 tok/s" in shown.getvalue()


def test_flatten_refuses_what_is_no_number():
    assert flatten({"a": 1, "b": {"c": 2.5, "d": {"e": 3}}}) == {"a": 1, "b_c": 2.5, "b_d_e": 3}
    with pytest.raises(AssertionError, match="b_c is 'x'"):
        flatten({"b": {"c": "x"}})


def test_running_mean():
    assert running_mean([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows yet"),
        ('{"step": 0, "reward": 1}\n{"step": 1, "rew', "line 2: is not JSON.*cut off"),
        ('{"loss": 1}\n', "line 1: has no step and reward"),
        ("[1]\n", "line 1: has no step and reward"),
    ],
)
def test_unreadable_metrics(tmp_path, text, said):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(LoraError, match=said):
        read_metrics(tmp_path)


def test_absent_metrics(tmp_path):
    with pytest.raises(LoraError, match=r"metrics\.jsonl: cannot be read"):
        read_metrics(tmp_path)


def test_plot_of_two_runs_shows_both_and_writes_one_picture(tmp_path):
    run(tmp_path / "first", [make_row(step) for step in range(3)])
    (tmp_path / "second").mkdir()
    with MetricsWriter(tmp_path / "second") as writer:
        for step in range(40):
            writer.write(flatten(make_row(step, kl=math.nan if step == 39 else 0.5)))
    shown = io.StringIO()
    picture = tmp_path / "new" / "both.png"
    plot_runs([tmp_path / "first", tmp_path / "second" / "metrics.jsonl"], picture, Console(file=shown, width=160))
    text = shown.getvalue()
    assert picture.read_bytes().startswith(PNG)
    assert "first" in text and "second" in text and "held-out reward 0.300 -> 0.900" in text
    steps = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert steps[:3] == ["1", "2", "3"] and (steps[3], steps[-1], len(steps[3:])) == ("1", "40", 12)
    assert "not finite" in text


def test_plot_writes_nothing_when_a_run_cannot_be_read(tmp_path):
    run(tmp_path / "first", [make_row(0)])
    with pytest.raises(LoraError):
        plot_runs([tmp_path / "first", tmp_path / "absent"], tmp_path / "both.png", Console(quiet=True))
    assert not (tmp_path / "both.png").exists()
