"""The processes of an engine: whether they live, and killing one at a given moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_PREFILL = "Prefill batch"


def alive(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_until_gone(group: int, seconds: float = 30.0) -> list[int]:
    """Processes of a group that run after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := alive(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@contextmanager
def killed_while_it_draws(log: Path, steps: Path | None = None) -> Iterator[None]:
    """SIGKILL for an engine's scheduler, once, when it has begun to draw.

    Args:
        log: what the engine prints; its arguments are beside it.
        steps: not before this file has a line.
    """
    ended = threading.Event()

    def begun() -> int:
        return log.read_text(errors="replace").count(_PREFILL)

    def run() -> None:
        while steps is not None and not (steps.exists() and steps.stat().st_size):
            if ended.wait(0.05):
                return
        scheduler = _scheduler(log.with_suffix(".json"))
        before = begun()
        while begun() == before:
            if ended.wait(0.005):
                return
        os.kill(scheduler, signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _scheduler(arguments: Path) -> int:
    """The child process that holds the model, of the server that was started with a file of arguments."""
    [server] = [one for one in psutil.process_iter(["cmdline"]) if str(arguments) in (one.info["cmdline"] or ())]
    [scheduler] = [one for one in server.children() if "scheduler" in " ".join(one.cmdline())]
    return scheduler.pid
