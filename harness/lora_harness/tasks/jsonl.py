"""Prompts and answers from JSONL files."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_harness.config.tasks import JsonlTask as Section
from lora_harness.tasks.base import Example, LazyExamples, Split
from lora_harness.tasks.scoring import find_scorer, guarded_score
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any

MAX_SHOWN = 5


class JsonlTask:
    """Rows of a JSONL file.

    Held-out rows come from ``eval_path``, or are the given share of ``train_path``'s different prompts with
    the lowest hash; equal prompts are never in both.

    Raises:
        LoraError: file missing or empty, rows that are no objects or lack a key (with line numbers), a prompt
            in both files.
    """

    def __init__(self, section: Section) -> None:
        self._section = section
        self._scorer = find_scorer(section.scorer, key="task.scorer")
        rows = self._read(section.train_path, "task.train_path")
        if section.eval_path is not None:
            self._rows = {"train": rows, "eval": self._read(section.eval_path, "task.eval_path")}
            self._refuse_overlap()
        else:
            assert section.eval_fraction is not None
            self._rows = self._hold_out(rows, section.eval_fraction)

    def prompts(self, split: Split, count: int, seed: int) -> Sequence[Example]:
        """See `Task.prompts`. Training rows come in a new order on every pass over the file."""
        rows = self._rows[split]
        if split == "eval" and count > len(rows):
            raise LoraError(
                f"eval.count = {count}",
                reason=f"there are only {len(rows)} held-out rows",
                cure=f"set eval.count to {len(rows)} or less, or {self._hold_out_more()}",
            )
        return LazyExamples(count, _passes(rows, random.Random(f"{seed}/{split}")))

    def score(self, example: Example, completion: str) -> float:
        """See `Task.score`."""
        section = self._section
        return guarded_score(self._scorer, example, completion, name=section.scorer, answer_tag=section.answer_tag)

    def _hold_out_more(self) -> str:
        if self._section.eval_path is not None:
            return "add rows to task.eval_path"
        return f"raise task.eval_fraction = {self._section.eval_fraction}, or give task.eval_path"

    def _read(self, path: Path, key: str) -> list[Example]:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise LoraError(
                f"{key} = {str(path)!r}", reason=f"cannot be read ({error})", cure="give an existing UTF-8 JSONL file"
            ) from None
        rows: list[Example] = []
        problems: list[Diagnostic] = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    rows.append(self._example(line))
                except LoraError as error:
                    where = f"{path}, line {number}"
                    problems += [Diagnostic(subject=where, reason=d.reason, cure=d.cure) for d in error.diagnostics]
        raise_if_any(f"{len(problems)} rows of {path} cannot be used:", problems[:MAX_SHOWN])
        if not rows:
            raise LoraError(f"{key} = {str(path)!r}", reason="has no rows", cure="write one JSON object a line into it")
        return rows

    def _example(self, line: str) -> Example:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise LoraError("line", reason=f"is not JSON ({error})", cure="write one JSON object a line") from None
        if not isinstance(row, dict):
            raise LoraError(
                "line", reason=f"is not an object but {line.strip()[:40]!r}", cure="write one JSON object a line"
            )
        needs_answer = self._section.scorer in ("exact", "math_verify")
        prompt = _text(row, self._section.prompt_key, "task.prompt_key")
        answer = None
        if needs_answer or self._section.answer_key in row:
            answer = _text(row, self._section.answer_key, "task.answer_key")
        return Example(prompt=prompt, answer=answer, source=row)

    def _refuse_overlap(self) -> None:
        held_out = {row.prompt for row in self._rows["eval"]}
        for row in self._rows["train"]:
            if row.prompt in held_out:
                raise LoraError(
                    f"task.eval_path = {str(self._section.eval_path)!r}",
                    reason=f"shares prompts with task.train_path, e.g. {row.prompt[:80]!r}",
                    cure="remove shared prompts from one of the files, or drop task.eval_path to hold out rows",
                )

    def _hold_out(self, rows: list[Example], fraction: float) -> dict[Split, list[Example]]:
        by_hash = sorted({row.prompt for row in rows}, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
        if len(by_hash) < 2:
            raise LoraError(
                f"task.train_path = {str(self._section.train_path)!r}",
                reason="has only one prompt, none is left to hold out",
                cure="add rows, or give task.eval_path",
            )
        held_out = set(by_hash[: min(max(1, round(fraction * len(by_hash))), len(by_hash) - 1)])
        return {
            "train": [row for row in rows if row.prompt not in held_out],
            "eval": [row for row in rows if row.prompt in held_out],
        }


def _passes(rows: list[Example], rng: random.Random) -> Iterator[Example]:
    while True:
        yield from rng.sample(rows, len(rows))


def _text(row: dict[str, Any], key: str, option: str) -> str:
    if key not in row:
        raise LoraError("row", reason=f"has no key {key!r} (it has {', '.join(row)})", cure=f"add it, or set {option}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise LoraError(
            "row", reason=f"{key!r} is {value!r}, not a text or number", cure="correct it, or remove the row"
        )
    return str(value)
