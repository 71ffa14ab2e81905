"""A world that fails says why, for every rank, at once, and harms no later case."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing import Layout, Outcome, WorldError, run_world

pytestmark = pytest.mark.world
TWO = Layout(tp=2)


def rank_of() -> int:
    return dist.get_rank()


@pytest.fixture(autouse=True)
def next_case_works() -> Iterator[None]:
    yield
    assert run_world(rank_of, TWO) == [0, 1]


def fails(fn: Callable[..., object], *args: object, layout: Layout = TWO, timeout: float = 120.0) -> WorldError:
    """The error of a case that must fail long before its timeout; one with a short timeout, soon after it."""
    run_world(rank_of, layout)  # the ranks are there: their start is not part of what is timed
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(fn, layout, *args, timeout=timeout)
    assert time.monotonic() - start < min(timeout, 60) + 30
    return caught.value


def wait_for_peer() -> None:
    dist.barrier()  # its peer fails after this one: this rank is then here, and no longer joining the world
    dist.barrier()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.barrier()
        print("last words")
        raise KeyError("no such factor")
    wait_for_peer()


def test_exception_on_one_rank() -> None:
    error = fails(raise_on, 1)
    assert str(error).splitlines()[0].endswith("raise_on on tp2: rank 1 raised: KeyError: 'no such factor'")
    waiting, raised = error.reports
    assert (raised.outcome, waiting.outcome) == (Outcome.RAISED, Outcome.RUNNING)
    assert 'raise KeyError("no such factor")' in raised.stack and "last words" in raised.output
    assert "in wait_for_peer" in waiting.stack and "in raise_on" in waiting.stack
    assert all(report.stack.rstrip() in str(error) for report in error.reports)


def test_every_rank_of_four_is_reported() -> None:
    error = fails(raise_on, 2, layout=Layout(tp=2, pp=2))
    assert [report.rank for report in error.reports] == [0, 1, 2, 3]
    assert [report.outcome for report in error.reports].count(Outcome.RUNNING) == 3


def skip_on_all() -> None:
    dist.barrier()
    pytest.skip("looks like success")


def test_a_skip_inside_a_rank_is_a_failure() -> None:
    error = fails(skip_on_all)
    # The other is given a moment only, and may not have come as far.
    outcomes = {report.outcome for report in error.reports}
    assert Outcome.RAISED in outcomes and outcomes <= {Outcome.RAISED, Outcome.RUNNING}
    assert "looks like success" in str(error)


def end_by(how: str) -> None:
    if dist.get_rank() == 0:
        wait_for_peer()
        return
    dist.barrier()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "crash":
        ctypes.string_at(0)
    else:
        os._exit(3)


@pytest.mark.parametrize(
    ("how", "code"),
    [("kill", "SIGKILL, exit code -9"), ("crash", "SIGSEGV, exit code -11"), ("exit", "exit code 3")],
)
def test_a_dead_rank_comes_first_with_its_exit_code(how: str, code: str) -> None:
    error = fails(end_by, how)
    other, dead = error.reports
    assert dead.outcome is Outcome.DIED and dead.summary.endswith(code)
    assert "rank 1 died" in str(error).splitlines()[0]
    assert "in wait_for_peer" in other.stack
    if how == "crash":
        assert "in end_by" in dead.stack


def stuck_on(rank: int) -> int:
    if dist.get_rank() == rank:
        dist.barrier()
        while True:
            time.sleep(0.01)
    if rank == 0:
        wait_for_peer()
    else:
        dist.barrier()
    return dist.get_rank()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_ends_at_the_timeout_with_stacks(rank: int) -> None:
    error = fails(stuck_on, rank, timeout=15.0)
    assert "not done after 15 s" in str(error)
    stuck, other = error.reports[rank], error.reports[1 - rank]
    assert stuck.outcome is Outcome.RUNNING and "in stuck_on" in stuck.stack
    assert other.outcome is (Outcome.RUNNING if rank == 0 else Outcome.RETURNED)
    assert ("in wait_for_peer" in other.stack) == (rank == 0)


def start_child_and_hang(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "300"])
    (folder / str(dist.get_rank())).write_text(str(child.pid))
    wait_for_peer()
    child.wait()


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    fails(start_child_and_hang, tmp_path, timeout=15.0)
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + 30
        while status.exists() and "\nState:\tZ" not in status.read_text():
            assert time.monotonic() < deadline, f"child {pid} of rank {rank} is still there"
            time.sleep(0.02)


def give_back_a_lambda() -> object:
    return lambda: torch.zeros(1)


def test_a_result_that_cannot_be_sent() -> None:
    assert "pickle" in str(fails(give_back_a_lambda)).lower()


def test_functions_and_arguments_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(LoraError, match="top level of a module"):
        run_world(lambda: None, TWO)
    with pytest.raises(LoraError, match="not picklable"):
        run_world(raise_on, TWO, lambda: None)
