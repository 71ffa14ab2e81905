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
        summary: one line: the exception, the exit code; empty otherwise.
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
        summary = f": {self.summary}" if self.summary else ""
        parts = [f"--- rank {self.rank} (pid {self.pid}) {self.outcome.value}{summary}"]
        parts += [self.stack.rstrip()] if self.stack else []
        lines = self.output.rstrip().splitlines()
        if lines:
            parts += [f"--- rank {self.rank} output, last {OUTPUT_LINES} lines", *lines[-OUTPUT_LINES:]]
        return "\n".join(parts)


class WorldError(RuntimeError):
    """A rank raised or died, or time ran out. The message holds every rank's traceback or stack.

    Args:
        what: one line: which function on which layout failed how.
        reports: one report per rank, in order of arrival; kept in rank order as ``reports``.
    """

    def __init__(self, what: str, reports: Sequence[RankReport]) -> None:
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
