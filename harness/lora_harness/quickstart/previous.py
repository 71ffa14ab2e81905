"""The files of an earlier quickstart in the same directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from lora_harness.report import refuse_used_output
from lora_plugins_sdk.errors import LoraError

BASE_NAME = "base"
_MARK = ".quickstart"
# What a run writes; the base and everything else in the directory stay.
_RUN_FILES = ("adapter", "config.toml", "metrics.jsonl", "reward.png", "sglang", "summary.json", "tensorboard")


def prepare_output(output: Path) -> bool:
    """Make `output` ready for a quickstart, removing the run files of an earlier one.

    Returns:
        Whether there was an earlier one.

    Raises:
        LoraError: `output` is a file, or holds files of a run that no quickstart made; nothing is removed then.
    """
    mark = output / _MARK
    if mark.is_file():
        found = [output / name for name in _RUN_FILES if (output / name).exists()]
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return bool(found)
    refuse_used_output(output)
    foreign = [name for name in _RUN_FILES if (output / name).exists()]
    if foreign:
        raise LoraError(
            str(output),
            reason=f"holds {', '.join(foreign)}, which no quickstart wrote",
            cure="choose another --output",
        )
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text("lora-grpo quickstart replaces the run in this directory when it is started again\n")
    return False
