"""Resident memory of this process (Linux)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_mib() -> float:
    """Resident set in MiB."""
    return _field("VmRSS")


def peak_of(work: Callable[[], object]) -> float:
    """Largest resident set in MiB while `work` runs.

    `getrusage` would not do: its maximum also covers the time before, and the parent process until `exec`.
    """
    _CLEAR.write_text("5")  # the peak starts anew from the present resident set
    work()
    return _field("VmHWM")


def _field(name: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024
