"""The quickstart as a newcomer starts it: reward before and after, from the files it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_lifts_the_held_out_reward(tmp_path: Path) -> None:
    """From a base that is wrong more often than right to 0.8 and more, without the engine ever leaving the trainer."""
    output = tmp_path / "quickstart"
    done = subprocess.run(
        [sys.executable, "-m", "lora_harness", "quickstart", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((output / "summary.json").read_text())
    assert 0.2 <= summary["reward_before"] <= 0.5
    assert summary["reward_after"] >= 0.8
    assert summary["logprob_gap_max"] <= 1e-4
    for name in ("adapter/adapter_model.safetensors", "reward.png", "metrics.jsonl"):
        assert (output / name).exists(), name
