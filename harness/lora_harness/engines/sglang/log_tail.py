"""The part of a log that one engine wrote."""

from __future__ import annotations

from pathlib import Path

from lora_plugins_sdk.staging import writable

_LINES = 15
# SGLang prints all of its arguments in one line.
_WIDTH = 500


class LogTail:
    """A log file from its present end on; earlier engines' lines are left alone.

    Args:
        path: the file; its directory is made.

    Raises:
        LoraError: the directory cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writable(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._begin = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """What was written since."""
        with self.path.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace").splitlines()

    def tail(self, count: int = _LINES) -> str:
        """The last lines of it."""
        return "\n".join(line[:_WIDTH] for line in self.lines()[-count:]) or "(nothing was printed)"
