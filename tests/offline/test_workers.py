"""Threads over files: every result, the first error, nothing left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from lora_plugins_sdk.offline.workers import Stopped, run_all


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(3))
    return 3


def test_results_come_in_the_order_of_the_items(processors: int) -> None:
    def work(item: int, proceed: Callable[[], None]) -> tuple[int, int]:
        proceed()
        time.sleep(0.01 * (5 - item))
        return item, torch.get_num_threads()

    threads = torch.get_num_threads()
    assert run_all(work, range(5)) == [(item, 1) for item in range(5)]
    assert torch.get_num_threads() == threads and run_all(work, []) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_error_ends_the_others(processors: int, error: type[BaseException]) -> None:
    ends, started = [], threading.Barrier(processors, timeout=30)

    def work(item: int, proceed: Callable[[], None]) -> None:
        if item < processors:  # the failed one's thread may take another before all are told
            started.wait()
        if item == 1:
            raise error("boom")
        try:
            while True:
                proceed()
                time.sleep(0.001)
        except Stopped:
            ends.append(item)
            raise

    before, threads = threading.active_count(), torch.get_num_threads()
    with pytest.raises(error, match="boom"):
        run_all(work, range(20))
    assert set(ends) >= {0, 2} and len(ends) <= processors
    assert (threading.active_count(), torch.get_num_threads()) == (before, threads)
