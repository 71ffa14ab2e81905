"""Every benchmark runs, at sizes that say nothing about speed, and reports in the agreed form."""

import importlib
import json
import math
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


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_runs_and_reports(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)  # for the processes that some of them start
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name], "--output", str(tmp_path)])
    importlib.import_module("benchmarks.qwen3_layer").one_process.cache_clear()  # its world ends with each test
    importlib.import_module(f"benchmarks.{name}").main()
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["rows"] and report["machine"]["threads"] == 1
    assert all(goal["met"] in (True, False) and math.isfinite(goal["measured"]) for goal in report["goals"])
    if name == "communication":
        (goal,) = report["goals"]
        assert goal["measured"] == goal["bound"] == 4 / 64
