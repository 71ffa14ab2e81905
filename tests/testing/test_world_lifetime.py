"""Rank processes live as long as the process that runs worlds, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins_sdk.testing import Layout, close_pool, run_world

pytestmark = pytest.mark.world

SCRIPT = """
import os, sys, time
from pathlib import Path
from lora_plugins_sdk.testing import Layout, run_world

def note_pids(folder, then_sleep):
    for pid in (os.getpid(), os.getppid()):
        Path(folder, str(pid)).touch()
    time.sleep(then_sleep)

if __name__ == "__main__":
    run_world(note_pids, Layout(tp=2), sys.argv[1], float(sys.argv[2]))
"""


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def test_no_process_and_no_file_outlives_the_parent(tmp_path: Path) -> None:
    """One parent ends by itself; one is killed while its ranks are at work."""
    (tmp_path / "script.py").write_text(SCRIPT)
    parents, folders = [], []
    for seconds in ("0", "300"):
        folders.append(tmp_path / seconds)
        (folders[-1] / "pids").mkdir(parents=True)
        command = [sys.executable, tmp_path / "script.py", folders[-1] / "pids", seconds]
        parents.append(subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folders[-1])}))
    try:
        for folder in folders:
            noted = folder / "pids"
            wait_until(lambda noted=noted: len(list(noted.iterdir())) == 3, 200, "ranks and launcher are noted")
        assert parents[0].wait(60) == 0
        parents[1].send_signal(signal.SIGKILL)
    finally:
        for parent in parents:
            parent.kill()
            parent.wait()
    found = [int(path.name) for path in tmp_path.glob("*/pids/*")]
    assert len(set(found)) == 6
    wait_until(lambda: not any(map(is_alive, found)), 60, f"processes {found} end")
    wait_until(lambda: not list(tmp_path.glob("*/lora-world-*")), 60, "temporary files are removed")


def pids_of_rank_and_launcher() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def test_idle_ranks_are_limited() -> None:
    pids = [pid for pid, _ in run_world(pids_of_rank_and_launcher, Layout(tp=2, dp=3))]
    assert len(set(pids)) == 6
    assert [is_alive(pid) for pid in pids] == [True] * 4 + [False] * 2


def test_close_pool_ends_every_process() -> None:
    pids = run_world(pids_of_rank_and_launcher, Layout(tp=2))
    close_pool()
    assert not any(is_alive(pid) for pair in pids for pid in pair)


def test_a_killed_launcher_is_replaced() -> None:
    first = run_world(pids_of_rank_and_launcher, Layout(tp=2))
    os.kill(first[0][1], signal.SIGKILL)
    wait_until(lambda: not is_alive(first[0][1]), 10, "the launcher ends")
    second = run_world(pids_of_rank_and_launcher, Layout(tp=2))
    assert second[0][1] != first[0][1]
    assert not any(is_alive(pid) for pid, _ in first)
