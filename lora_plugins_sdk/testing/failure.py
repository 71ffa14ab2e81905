"""What became of each rank, and the error that tells it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

OUTPUT_LINES = 40


class Outcome(Enum):
    """How a rank stood when its world was judged; likely causes first (a death makes the peers raise)."""

    DIED = "died"
    RAISED = "raised"
    RUNNING = "was still running"
    RETURNED = "returned"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank of a failed world.

    Args:
        rank: global rank.
        pid: process id it had.
        outcome: how it stood.
        summary: the exception, whole, or the exit code; empty otherwise.
        stack: traceback of a rank that raised, python stacks of a running one, crash dump of one that died.
        output: what the rank wrote to stdout and stderr during the case.
    """

    rank: int
    pid: int
    outcome: Outcome
    summary: str = ""
    stack: str = ""
    output: str = ""

    def __str__(self) -> str:
        summary = f": {self.summary.splitlines()[0]}" if self.summary else ""  # the stack ends with all of it
        parts = [f"--- rank {self.rank} (pid {self.pid}) {self.outcome.value}{summary}"]
        parts += [self.stack.rstrip()] if self.stack else []
        lines = self.output.rstrip().splitlines()
        if lines:
            parts += [f"--- rank {self.rank} output, last {OUTPUT_LINES} lines", *lines[-OUTPUT_LINES:]]
        return "\n".join(parts)


class WorldError(RuntimeError):
    """A rank raised or died, or time ran out. The message holds every rank's traceback or stack.

    Args:
        what: which function on which layout failed how; kept.
        reports: one report per rank, in order of arrival; kept in rank order as ``reports``.
        first: the rank that failed first; None when none did in time.
    """

    def __init__(self, what: str, reports: Sequence[RankReport], first: int | None = None) -> None:
        self.what = what
        self.first = first
        self.reports = tuple(sorted(reports, key=lambda report: report.rank))
        shown = sorted(reports, key=lambda report: list(Outcome).index(report.outcome))
        super().__init__("\n".join([what, *map(str, shown)]))


def describe_exit(code: int | None) -> str:
    """Words for an exit code as :func:`os.waitstatus_to_exitcode` gives it (negative: a signal)."""
    if code is None:
        return "closed its connection, exit code unknown"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}, exit code {code}"
    return f"exit code {code}"
