"""Resume anywhere: three steps, a checkpoint, three more, against six at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_run import CUT, STEPS, config_of, rows, train, write_model
from safetensors.torch import load_file

from lora_harness.config import dump_config
from lora_harness.report import Summary
from lora_plugins_sdk.testing import Layout, run_world

pytestmark = pytest.mark.world
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(dp=2),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2, sequence_parallel=True),
    Layout(dp=4),
    Layout(pp=2, dp=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at once, with a checkpoint after three and after six."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run_world(train, Layout(), config_of(model, output))
    return output


def cut_off(straight: Path, output: Path) -> Path:
    """The straight run as a kill in its fifth step would have left it."""
    shutil.copytree(straight, output, ignore=shutil.ignore_patterns("step-000006", "summary.json", "adapter"))
    shutil.copytree(
        straight / "checkpoints" / "step-000003", output / "checkpoints" / "step-000003", dirs_exist_ok=True
    )
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[: CUT + 1]) + lines[CUT + 1][:20])
    return output


def tensors(output: Path) -> dict[str, torch.Tensor]:
    """Final adapter and moments."""
    last = output / "checkpoints" / f"step-{STEPS:06d}"
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    assert all(
        torch.equal(adapter[name], one)
        for name, one in load_file(last / "adapter" / "adapter_model.safetensors").items()
    )
    return adapter | load_file(last / "optimizer.safetensors")


def test_resumed_run_equals_the_straight_one_bit_for_bit(
    model: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B15, B17: adapter, moments, learning rate, prompts, samples and minibatches go on where they stopped."""
    output = cut_off(straight, tmp_path / "run")
    run_world(train, Layout(), config_of(model, output), "auto")
    expected, found = rows(straight), rows(output)
    # The new engine had to get the adapter that the old one held already.
    assert (expected[CUT]["bytes_synced"], found[CUT]["bytes_synced"]) == (0, expected[0]["bytes_synced"])
    found[CUT]["bytes_synced"] = 0
    assert found == expected
    assert {row["adapter_version"] for row in expected[CUT:]} == {4, 5, 6}
    theirs = tensors(straight)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors(output).items())
    before, after = Summary.read(straight), Summary.read(output)
    assert (after.reward_before, after.reward_after) == (before.reward_before, before.reward_after)
    assert (after.steps, after.tokens) == (STEPS, before.tokens)
    shown = capfd.readouterr().out
    assert "dropped 2 rows after step 3" in shown and "resuming after step 3 from" in shown


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_resume_under_another_topology(model: Path, straight: Path, tmp_path: Path, layout: Layout) -> None:
    """B16, B18, B22: full tensors, resharded; no rank starts fresh and no stage is lost."""
    output = cut_off(straight, tmp_path / "run")
    run_world(train, layout, config_of(model, output, layout), str(output / "checkpoints" / "step-000003"))
    for expected, found in zip(rows(straight), rows(output), strict=True):
        # Which token differs most is decided by rounding, where none differs by more.
        compared = {name for name in expected if name != "bytes_synced" and not name.startswith("logprob_gap_worst_")}
        assert found.keys() == expected.keys()
        assert [found[name] for name in compared] == pytest.approx([expected[name] for name in compared], abs=1e-5)
    theirs, ours = tensors(straight), tensors(output)
    assert ours.keys() == theirs.keys() and len(ours) == 3 * 2 * (2 * 7 + 1)
    for name, tensor in ours.items():
        # Stages compute what one process does, in the same order.
        assert (tensor - theirs[name]).abs().max() <= (0.0 if layout == Layout(pp=2) else 1e-6), name


@pytest.mark.slow
def test_resume_from_the_command_line(model: Path, straight: Path, tmp_path: Path) -> None:
    output, config = cut_off(straight, tmp_path / "run"), tmp_path / "run.toml"
    config.write_text(dump_config(config_of(model, output)))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "lora_harness", "train", str(config), "--resume", "auto"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 3" in done.stdout
    theirs = tensors(straight)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors(output).items())
    assert [row["reward"] for row in rows(output)] == [row["reward"] for row in rows(straight)]


def saved_again(config: Any, path: Path) -> dict[str, torch.Tensor]:
    """What a policy saves right after it was restored."""
    from lora_harness.checkpoint import read_checkpoint, read_state
    from lora_harness.trainer import MegatronPolicy
    from lora_plugins_sdk.testing import current_run

    policy, state = MegatronPolicy(config, current_run()), read_state(path)
    policy.restore(read_checkpoint(path, state), updates=state.updates)
    again = policy.checkpoint()
    assert policy.updates == state.updates == 2 * CUT
    return {**again.adapter.tensors, **again.moments}


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, dp=2, sequence_parallel=True)], ids=str)
def test_weights_and_moments_are_resharded_bit_for_bit(model: Path, straight: Path, layout: Layout) -> None:
    """B16, B18, B22: what another topology loads, it saves again, bit for bit and on every rank."""
    path = straight / "checkpoints" / "step-000003"
    stored = load_file(path / "adapter" / "adapter_model.safetensors") | load_file(path / "optimizer.safetensors")
    for rank in run_world(saved_again, layout, config_of(model, path, layout), path):
        assert rank.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in rank.items())
    assert all(tensor.abs().max() > 0 for tensor in stored.values())


def test_weights_alone_begin_a_new_run(model: Path, straight: Path, tmp_path: Path) -> None:
    """B17: the moments, the counters and the place in the data are those of a run that just begins."""
    config = config_of(
        model,
        tmp_path / "new",
        steps=1,
        checkpoint={"every": 1, "keep": 1},
        optimizer={"lr": 0.002},
        eval={"count": 4},
    )
    source = straight / "checkpoints" / "step-000003"
    run_world(train, Layout(), config, str(source), load_weights_only=True)
    state = json.loads((tmp_path / "new" / "checkpoints" / "step-000001" / "state.json").read_text())
    assert (state["step"], state["updates"], [row["step"] for row in rows(tmp_path / "new")]) == (1, 2, [0])
    begun = load_file(source / "adapter" / "adapter_model.safetensors")
    ended = load_file(tmp_path / "new" / "adapter" / "adapter_model.safetensors")
    assert all((ended[name] - one).abs().max() < 0.01 for name, one in begun.items())
    moments = load_file(tmp_path / "new" / "checkpoints" / "step-000001" / "optimizer.safetensors")
    before = load_file(source / "optimizer.safetensors")
    assert all(not torch.equal(one, before[name]) for name, one in moments.items())
