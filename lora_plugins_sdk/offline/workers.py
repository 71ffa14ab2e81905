"""Several weight files at once: each worker streams one, so memory grows by a few rows a worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

# More than this waits for the disk rather than for processors.
_MOST_WORKERS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(Exception):
    """Raised in a worker because another one failed."""


def run_all(work: Callable[[Item, Callable[[], None]], Result], items: Sequence[Item]) -> list[Result]:
    """Run `work(item, proceed)` for every item in threads with one torch thread each.

    Args:
        work: calls `proceed()` now and then; it raises once the work is no longer wanted.
        items: what to work on.

    Returns:
        The results, in the order of the items.

    Raises:
        BaseException: the first error of a worker, or an interrupt of this thread; the others have ended then.
    """
    stop = threading.Event()

    def proceed() -> None:
        if stop.is_set():
            raise Stopped

    threads = torch.get_num_threads()
    workers = max(1, min(len(items), len(os.sched_getaffinity(0)), _MOST_WORKERS))
    try:
        # torch's own threads would be one team for each worker, all on the same processors.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            futures = [pool.submit(work, item, proceed) for item in items]
            try:
                for done in as_completed(futures):
                    done.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
            return [future.result() for future in futures]
    finally:
        torch.set_num_threads(threads)
