"""``metrics.jsonl``: one JSON object a training step.

JSON has no NaN or infinity. A value that is not finite is written as null, its name is added to the row's
``not_finite`` list, and the writer's caller learns of it, so that no reader takes it for a number or for
absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.staging import writable

FILE_NAME = "metrics.jsonl"


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, float | int]:
    """A row with nested tables laid flat: ``{"seconds": {"sync": 1.0}}`` becomes ``{"seconds_sync": 1.0}``."""
    flat: dict[str, float | int] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}_")
        else:
            assert isinstance(value, int | float), f"metric {prefix}{name} is {value!r}, not a number"
            flat[prefix + name] = value
    return flat


class MetricsWriter:
    """Appends rows to ``metrics.jsonl``; each is on disk when `write` returns.

    Args:
        directory: of the run.
        resumed: add to the file that is there; without it there must be none.
    """

    def __init__(self, directory: Path, *, resumed: bool = False) -> None:
        self._file = (directory / FILE_NAME).open("a" if resumed else "x", encoding="utf-8")

    def write(self, row: Mapping[str, float | int]) -> list[str]:
        """Write one flat row; returns the names of values that are not finite."""
        broken = [name for name, value in row.items() if not math.isfinite(value)]
        record: dict[str, Any] = {name: None if name in broken else value for name, value in row.items()}
        if broken:
            record["not_finite"] = broken
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        return broken

    def sync(self) -> None:
        """Make the rows so far survive a crash of the machine."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def keep_rows(directory: Path, steps: int) -> tuple[list[dict[str, float | int]], int]:
    """Cut a run's ``metrics.jsonl`` down to its first `steps` rows, which a checkpoint stands for.

    Returns:
        These rows as they were given to `MetricsWriter.write` (a value that was not finite is NaN), and how many later
        ones were dropped.

    Raises:
        LoraError: a row of a finished step is missing or damaged; the file is as it was.
    """
    file = directory / FILE_NAME
    cure = "resume in the directory of that run, or start a new run from the weights alone"
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise LoraError(str(file), reason=f"cannot be read ({error.strerror})", cure=cure) from None
    rows = []
    for step, line in enumerate(lines[:steps]):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.get("step") != step:
            raise LoraError(f"{file}, line {step + 1}", reason=f"is not the row of step {step}", cure=cure)
        row.pop("not_finite", None)
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    if len(rows) < steps:
        raise LoraError(str(file), reason=f"has {len(rows)} rows, the checkpoint stands for {steps}", cure=cure)
    if len(lines) > steps:
        part = file.with_name(f".{FILE_NAME}.part")
        with writable(file):
            part.write_bytes(b"".join(lines[:steps]))
            part.replace(file)
    return rows, len(lines) - steps


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``, or of the one in a run's output directory.

    Raises:
        LoraError: no such file, no row, or a line that is no row.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LoraError(
            str(file), reason=f"cannot be read ({error.strerror})", cure="give the output directory of a run"
        ) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise LoraError(
                f"{file}, line {number}",
                reason=f"is not JSON ({error})",
                cure="remove the line, if a run was cut off there",
            ) from None
        if not isinstance(row, dict) or "step" not in row or "reward" not in row:
            raise LoraError(
                f"{file}, line {number}", reason="has no step and reward", cure="give a run's metrics.jsonl"
            )
        rows.append(row)
    if not rows:
        raise LoraError(str(file), reason="has no rows yet", cure="wait for the first training step")
    return rows
