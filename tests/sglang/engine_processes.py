"""The processes of an engine: whether they live, and killing one at a given moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
        steps: not before this file has a line; without it the engine serves already, and draws within the block.
    """
    ended, failed = threading.Event(), []
    # Before the block: looking for a process may take longer than until an engine has begun all that it is asked.
    serving = None if steps else (_scheduler(log.with_suffix(".json")), prefills(log))

    def happened(what: Callable[[], bool]) -> bool:
        while not what():
            if ended.wait(0.005):
                return False
        return True

    def run() -> None:
        if serving is not None:
            scheduler, before = serving
        else:
            # The first step's completions are drawn before its line is there.
            if not (happened(log.exists) and happened(lambda: prefills(log) > 0)):
                return
            scheduler = _scheduler(log.with_suffix(".json"))
            if not happened(lambda: steps is not None and steps.exists() and steps.stat().st_size > 0):
                return
            before = prefills(log)
        if happened(lambda: prefills(log) > before):
            os.kill(scheduler, signal.SIGKILL)

    def run_noted() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run_noted)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failed, failed[0]


def prefills(log: Path) -> int:
    """How many batches of prompts an engine has begun, by what it prints."""
    return log.read_text(errors="replace").count(_PREFILL)


def _scheduler(arguments: Path) -> int:
    """The child process that holds the model, of the server that was started with a file of arguments."""
    [server] = [one for one in psutil.process_iter(["cmdline"]) if str(arguments) in (one.info["cmdline"] or ())]
    [scheduler] = [one for one in server.children() if "scheduler" in _command(one)]
    return scheduler.pid


def _command(process: psutil.Process) -> str:
    """Nothing for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
