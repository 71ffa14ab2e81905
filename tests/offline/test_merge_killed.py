"""A merge that is killed or runs out of disk leaves nothing that looks like an output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from offline_files import fingerprint, make_adapter, make_base

from lora_plugins_sdk.offline.merge import merge, plan_merge


@pytest.mark.slow
def test_kill_at_every_touch_of_the_disk(tmp_path: Path) -> None:
    """SIGKILL for real: no half output under its name, inputs untouched, the next merge succeeds and cleans up."""
    script = Path(__file__).with_name("killed_merges.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=250, env=environ
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["faults"] == []
    # Before the rename and after it, with remains and without: each was really met.
    assert found["points"] > 50 and 0 < found["published"] < found["remains"] < found["points"]
    assert "merged: cannot be written (File too large)" in found["full_disk"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    plan = plan_merge(make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter"), tmp_path / "merged")
    before, seen = fingerprint(tmp_path), []

    def interrupt(size: int) -> None:
        seen.append(size)
        if sum(seen) > plan.read_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(plan, interrupt)
    assert fingerprint(tmp_path) == before


def test_progress_adds_up(tmp_path: Path) -> None:
    plan = plan_merge(make_base(tmp_path / "base", shards=3), make_adapter(tmp_path / "adapter"), tmp_path / "merged")
    seen: list[int] = []
    merge(plan, seen.append)
    assert sum(seen) == plan.read_bytes == plan.write_bytes and len(seen) > 10
