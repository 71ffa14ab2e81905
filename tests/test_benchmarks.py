"""Every benchmark runs, at sizes that say nothing about speed, and reports in the agreed form."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL = ["--hidden", "64", "--layers", "1", "--vocab", "32", "--rank", "2"]
SMALL = {
    "branch_cost": ["--hidden", "64", "--rank", "2", "4", "--tokens", "8", "--rounds", "1"],
    "branch_forms": ["--hidden", "64", "--rank", "2", "--tokens", "8", "--rounds", "1"],
    "communication": ["--hidden", "64", "--rank", "4", "--tokens", "8"],
    "grouped_experts": [
        "--experts",
        "3",
        "--rank",
        "4",
        "--tokens",
        "8",
        "--hidden",
        "16",
        "--width",
        "8",
        "--rounds",
        "1",
    ],
    "offline_merge": ["--gigabytes", "0.002", "--files", "2", "--hidden", "64", "--rounds", "1"],
    "training_step": [*MODEL, "--sequences", "2", "--length", "8", "--rounds", "1"],
}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_runs_and_reports(name: str, tmp_path: Path) -> None:
    done = run(name, *SMALL[name], "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["rows"] and report["machine"]["threads"] == 1
    assert all(goal["met"] in (True, False) and math.isfinite(goal["measured"]) for goal in report["goals"])
    if name == "communication":
        (goal,) = report["goals"]
        assert goal["measured"] == goal["bound"] == 4 / 64
