"""Whole runs as a user starts them: `lora-grpo train`, alone and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

HERE = Path(__file__).parent
STEPS = 5
COMPARED = ("reward", "kl", "entropy", "clip_share", "grad_norm", "tokens", "completion_length")

CONFIG = """
steps = {steps}
output = "{output}"
seed = 3
[model]
path = "{model}"
[task]
kind = "function"
prompts = "toy_rewards:prompts"
reward = "toy_rewards:reward"
[lora]
rank = 4
alpha = 8.0
target_modules = ["all-linear", "embed_tokens"]
[algorithm]
prompts_per_step = 6
group_size = 4
kl_coef = 0.05
[optimizer]
lr = 0.01
schedule = "cosine"
[rollout]
max_new_tokens = 6
[eval]
count = 10
every = 3
temperature = 1.0
samples = 2
"""


def run_harness(model: Path, directory: Path, *overrides: str, ranks: int = 1) -> Path:
    """Train as a user does; returns the output directory."""
    directory.mkdir(exist_ok=True)
    output = directory / "run"
    config = directory / "config.toml"
    config.write_text(CONFIG.format(steps=STEPS, output=output, model=model))
    python = [sys.executable, "-m"]
    start = (
        python if ranks == 1 else [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    sets = [part for override in overrides for part in ("--set", override)]
    done = subprocess.run(
        [*start, "lora_harness", "train", str(config), *sets],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(output: Path, expected: Path, *, within: float = 1e-3) -> None:
    """Every compared metric of every step and every tensor of the adapter are those of another run."""
    for one, found in zip(rows(expected), rows(output), strict=True):
        for name in COMPARED:
            assert found[name] == pytest.approx(one[name], abs=within), (one["step"], name)
    adapter, reference = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (output, expected))
    assert adapter.keys() == reference.keys()
    for name, tensor in reference.items():
        assert (adapter[name] - tensor).abs().max() <= within, name
