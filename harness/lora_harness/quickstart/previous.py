"""The files of an earlier quickstart in the same directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_harness.report import refuse_used_output
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.staging import exclusive, remove, writable

BASE_NAME = "base"
_MARK = ".quickstart"
_ASIDE = ".replaced"
# What is there is being removed, and never comes back.
_REMOVED = ".removed"
# What a run writes; the base and everything else in the directory stay.
_RUN_FILES = (
    "adapter",
    "checkpoints",
    "config.toml",
    "metrics.jsonl",
    "reward.png",
    "sglang",
    "summary.json",
    "tensorboard",
    # What a killed run leaves of the adapter.
    ".adapter.lock",
    ".adapter.partial",
    ".adapter.replaced",
)


@contextmanager
def earlier_run_aside(output: Path) -> Iterator[bool]:
    """Make `output` ready for a quickstart; the run files of an earlier one lie aside within the context.

    They are removed when it ends well, and put back with an error: whatever refuses the new run leaves the earlier
    result. Where the new run had made another base (`replaced_base`), that one goes and the earlier result's comes
    back. What a killed process left aside is put back by the next.

    Yields:
        Whether there was an earlier one.

    Raises:
        LoraError: `output` is a file, another process runs there, it cannot be written, or it holds files of a run
            that no quickstart made; nothing is changed then.
    """
    mark, aside = output / _MARK, output / _ASIDE
    if not mark.is_file():
        _refuse_foreign(output)
    with writable(output):
        output.mkdir(parents=True, exist_ok=True)
        lock = exclusive(output / ".lock", output)
        lock.__enter__()
    try:
        with writable(output):
            mark.write_text("lora-grpo quickstart replaces the run in this directory when it is started again\n")
            remove(output / _REMOVED)
            _put_back(aside, output)
            found = [name for name in _RUN_FILES if os.path.lexists(output / name)]
            aside.mkdir()
            for name in found:
                (output / name).rename(aside / name)
        try:
            yield bool(found)
        except BaseException:
            with writable(output):
                _put_back(aside, output)
            raise
        with writable(output):
            # In one step: half of an earlier result must not be put back.
            aside.rename(output / _REMOVED)
            remove(output / _REMOVED)
    finally:
        lock.__exit__(None, None, None)


def _refuse_foreign(output: Path) -> None:
    refuse_used_output(output)
    foreign = [name for name in _RUN_FILES if (output / name).exists()]
    if foreign:
        raise LoraError(
            str(output),
            reason=f"holds {', '.join(foreign)}, which no quickstart wrote",
            cure="choose another --output",
        )


def replaced_base(output: Path) -> Path:
    """Where the base of an earlier result lies within `earlier_run_aside`, when the new run made another."""
    return output / _ASIDE / BASE_NAME


def _put_back(aside: Path, output: Path) -> None:
    """An earlier result with its base, which replaces a newer one; without a result a newer base is worth more.

    Of the result only what is not there: logs of engines that did not start are newer, and the error names them.
    """
    found = [name for name in _RUN_FILES if os.path.lexists(aside / name)]
    if found and os.path.lexists(aside / BASE_NAME):
        remove(output / BASE_NAME)
        (aside / BASE_NAME).rename(output / BASE_NAME)
    for name in found:
        if not os.path.lexists(output / name):
            (aside / name).rename(output / name)
    remove(aside)
