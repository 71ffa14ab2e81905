"""An error that many checks run into is told whole once; the others say where."""

from __future__ import annotations

import traceback

from lora_plugins_sdk.testing.failure import Outcome, RankReport, WorldError


class Repeats:
    """The errors that cases of one subject ended with, and the case that met each first."""

    def __init__(self) -> None:
        self._first: dict[object, str] = {}

    def text(self, error: Exception, case_id: str) -> str:
        """What a case says of an error that it ended with.

        Args:
            error: what the case raised: of ranks, or of this process.
            case_id: the case.

        Returns:
            The message and every stack; of an error that another case has told, the message and that case's id.
        """
        message = str(error) if isinstance(error, WorldError) else f"{type(error).__name__}: {error}"
        first = self._first.setdefault(_identity(error), case_id)
        if first != case_id:
            return f"{_summary(error, message)}\n(the same as in {first}, which shows where)"
        return message if isinstance(error, WorldError) else f"{message}\n{''.join(traceback.format_exception(error))}"


def _summary(error: Exception, message: str) -> str:
    """The message without what only the first case needs."""
    return error.what if isinstance(error, WorldError) else message


def _identity(error: Exception) -> object:
    """What two errors of one cause have in common: every check takes its own way to the line that raises."""
    if isinstance(error, WorldError):
        return tuple(_of_rank(one) for one in error.reports if one.outcome is not Outcome.RETURNED)
    frames = traceback.extract_tb(error.__traceback__)
    return type(error), str(error), frames[-1][:2] if frames else None


def _of_rank(report: RankReport) -> object:
    if report.outcome is not Outcome.RAISED:
        return report.rank, report.outcome, report.summary, report.stack
    places = [line for line in report.stack.splitlines() if line.lstrip().startswith('File "')]
    return report.rank, report.outcome, report.summary, places[-1:] and places[-1]
