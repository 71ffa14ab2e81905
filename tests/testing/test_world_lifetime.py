"""Rank processes live as long as the process that runs worlds, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_process_and_no_file_outlives_the_parent(end: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", pids, "300" if end == "kill" else "0"],
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    try:
        if end == "exit":
            assert parent.wait(60) == 0
        else:
            wait_until(lambda: len(list(pids.iterdir())) == 3, 60, "two ranks and their launcher note their ids")
            parent.send_signal(signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    found = [int(path.name) for path in pids.iterdir()]
    assert len(found) == 3
    wait_until(lambda: not any(map(is_alive, found)), 10, f"processes {found} end")
    wait_until(lambda: not list(temporary.iterdir()), 10, "temporary files are removed")


def pids_of_rank_and_launcher() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def test_a_killed_launcher_is_replaced() -> None:
    first = run_world(pids_of_rank_and_launcher, Layout(tp=2))
    os.kill(first[0][1], signal.SIGKILL)
    wait_until(lambda: not is_alive(first[0][1]), 10, "the launcher ends")
    second = run_world(pids_of_rank_and_launcher, Layout(tp=2))
    assert second[0][1] != first[0][1]
    assert not any(is_alive(pid) for pid, _ in first)


def test_close_pool_ends_the_ranks_and_leaves_the_runner_usable() -> None:
    first = run_world(pids_of_rank_and_launcher, Layout(tp=2))
    close_pool()
    assert not any(is_alive(pid) for pair in first for pid in pair)
    assert run_world(pids_of_rank_and_launcher, Layout())[0][0] not in first[0]


def test_idle_ranks_are_limited() -> None:
    pids = [pid for pid, _ in run_world(pids_of_rank_and_launcher, Layout(tp=2, dp=3))]
    assert len(set(pids)) == 6
    assert [is_alive(pid) for pid in pids] == [True] * 4 + [False] * 2
