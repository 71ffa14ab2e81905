"""The checkpoints of one run, by step: which are there, which is the newest, which may go."""

from __future__ import annotations

import re
from pathlib import Path

from lora_harness.checkpoint.state import STATE_FILE
from lora_plugins_sdk.staging import remove, sync, writable

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
# What a killed save, lock or removal leaves: never taken for a checkpoint, removed by the next owner of the run.
_LEFTOVER = re.compile(r"\.step-\d{6,}\.(partial|lock|removed)")


class CheckpointDirectory:
    """`checkpoints/` of a run's output. Changed by the process that owns the run alone.

    Args:
        output: the run's output directory.
    """

    def __init__(self, output: Path) -> None:
        self.path = output / FOLDER

    def place(self, step: int) -> Path:
        """Where the checkpoint after `step` finished steps belongs."""
        return self.path / f"step-{step:06d}"

    def prepare(self) -> None:
        """Make the folder durably.

        Raises:
            LoraError: it cannot be made.
        """
        with writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync(self.path.parent)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order. A save that was interrupted never shows up."""
        if not self.path.is_dir():
            return []
        names = ((_NAME.fullmatch(one.name), one) for one in self.path.iterdir())
        return sorted(int(match[1]) for match, path in names if match and (path / STATE_FILE).is_file())

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None when there is none."""
        steps = self.steps()
        return self.place(steps[-1]) if steps else None

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints, the oldest first."""
        for step in self.steps()[:-keep]:
            self._remove(step)

    def remove_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps than `step`; returns theirs."""
        later = [one for one in self.steps() if one > step]
        for one in reversed(later):
            self._remove(one)
        return later

    def sweep(self) -> None:
        """Remove what killed processes left."""
        if self.path.is_dir():
            with writable(self.path):
                for path in list(self.path.iterdir()):
                    if _LEFTOVER.fullmatch(path.name):
                        remove(path)

    def _remove(self, step: int) -> None:
        # Out of sight in one rename: a removal cut short leaves no half of a checkpoint.
        path = self.place(step)
        hidden = path.with_name(f".{path.name}.removed")
        with writable(path):
            remove(hidden)
            path.rename(hidden)
            remove(hidden)
