"""Time several forms of the same work side by side."""

from __future__ import annotations

import ctypes
import math
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


def interleaved(
    forms: Mapping[str, Callable[[], object]], rounds: int, *, cold: bool = False
) -> dict[str, list[float]]:
    """CPU seconds of every form in every round.

    All forms run once in each round, so that whatever else the machine does meets them alike, after a first round that
    is not measured. CPU time of the process, not wall time: with one thread they agree on an idle machine, and on a
    busy one the former leaves out the time in which others ran.

    Args:
        forms: name -> the work.
        rounds: measured rounds.
        cold: write 64 MiB before each run, so that none finds its operands in the cache.
    """
    swept = torch.zeros(1 << 24)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form()
    for _ in range(rounds):
        for name, form in forms.items():
            if cold:
                swept.add_(1.0)
            start = time.process_time()
            form()
            seconds[name].append(time.process_time() - start)
    return seconds


def excess(seconds: Mapping[str, Sequence[float]], form: str, base: str) -> float:
    """Median over the rounds of what `form` took longer than `base` in the same round."""
    return statistics.median(_differences(seconds, form, base))


def excess_error(seconds: Mapping[str, Sequence[float]], form: str, base: str) -> float:
    """Standard error of `excess`, from the quartiles: 1.25 (the median's) * IQR / 1.35 (a normal's) / sqrt(rounds)."""
    differences = _differences(seconds, form, base)
    if len(differences) < 2:
        return math.nan
    low, _, high = statistics.quantiles(differences, n=4)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(differences))


def _differences(seconds: Mapping[str, Sequence[float]], form: str, base: str) -> list[float]:
    return [a - b for a, b in zip(seconds[form], seconds[base], strict=True)]
