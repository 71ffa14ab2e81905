"""Python stacks of another process: it dumps them into a file when signalled, even while it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

STACK_SIGNAL = signal.SIGUSR1
_ANSWER_SECONDS = 3.0
_QUIET_SECONDS = 0.5  # on a busy machine a process may pause so long within a dump

_file: TextIO | None = None


def serve_stacks(path: Path) -> None:
    """In the watched process: on :data:`STACK_SIGNAL` or a crash (SIGSEGV) dump stacks into `path`."""
    global _file  # faulthandler keeps the descriptor only; the object must outlive the call
    _file = path.open("w")
    faulthandler.enable(_file)
    faulthandler.register(STACK_SIGNAL, _file, all_threads=True, chain=False)


def request_stacks(paths: Mapping[int, Path]) -> dict[int, str]:
    """Stacks of the live processes in `paths` (pid -> the file it was given), most recent call first."""
    before = {pid: path.stat().st_size for pid, path in paths.items()}
    for pid in paths:
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _ANSWER_SECONDS
    sizes, quiet_since = dict(before), time.monotonic()
    while (now := time.monotonic()) < deadline:
        seen = {pid: path.stat().st_size for pid, path in paths.items()}
        if seen != sizes:
            sizes, quiet_since = seen, now
        elif now - quiet_since > _QUIET_SECONDS and all(seen[pid] > before[pid] for pid in paths):
            break
        time.sleep(0.02)
    return {pid: _python_threads(path.read_text()[before[pid] :], pid) for pid, path in paths.items()}


def _python_threads(dump: str, pid: int) -> str:
    """The dump without the thread that only watches for the parent's death."""
    threads = [thread for thread in dump.split("\n\n") if "in watch_parent" not in thread]
    return "\n\n".join(threads) or f"(pid {pid} gave no stack within {_ANSWER_SECONDS:.0f} s: stopped, or dead)"
