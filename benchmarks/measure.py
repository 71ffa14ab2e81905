"""Time several forms of the same work side by side."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def prepare() -> None:
    """One torch thread, and freed memory stays with the process.

    By default glibc returns large tensors to the kernel or keeps them, depending on what was allocated before; the page
    faults of the former (half a microsecond each) would land on whichever form happens to run then.
    """
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only; elsewhere nothing is changed
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def interleaved(forms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every form in every round.

    All forms run once in each round, so that whatever else the machine does meets them alike, after a first round that
    is not measured. CPU time of the process, not wall time: with one thread they agree on an idle machine, and on a
    busy one the former leaves out the time in which others ran.

    Args:
        forms: name -> the work.
        rounds: measured rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form()
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.process_time()
            form()
            seconds[name].append(time.process_time() - start)
    return seconds


def excess(seconds: Mapping[str, Sequence[float]], form: str, base: str) -> float:
    """Median over the rounds of what `form` took longer than `base` in the same round."""
    return statistics.median(a - b for a, b in zip(seconds[form], seconds[base], strict=True))
