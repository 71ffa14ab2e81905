"""Prompts and rewards from the user's own functions.

    def prompts(split, count, seed, **params):     # split is "train" or "eval"
        return [{"prompt": "2+2=", "answer": "4"}, ...]   # count of them; mappings or `Example`s

    def reward(example, completion):
        return 1.0 if completion == example.answer else 0.0

The same arguments must give the same prompts (every rank asks for itself), and the two splits must share
none. Other keys of a mapping are in ``example.source``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_harness.config.tasks import FunctionTask as Section
from lora_harness.tasks.base import Example, Split
from lora_harness.tasks.imports import import_function
from lora_harness.tasks.scoring import guarded_score
from lora_plugins_sdk.errors import LoraError


class FunctionTask:
    """Two functions by import path.

    Raises:
        LoraError: a path that cannot be imported.
    """

    def __init__(self, section: Section) -> None:
        self._section = section
        self._prompts = import_function(section.prompts, key="task.prompts")
        self._reward = import_function(section.reward, key="task.reward")
        self._seen: dict[Split, set[str]] = {"train": set(), "eval": set()}

    def prompts(self, split: Split, count: int, seed: int) -> Sequence[Example]:
        """See `Task.prompts`."""
        subject = f"prompts function {self._section.prompts}"
        try:
            found = list(self._prompts(split, count, seed, **self._section.params))
        except Exception as error:
            raise LoraError(
                subject,
                reason=f"raised {type(error).__name__}: {error} for split {split!r}, count {count}, seed {seed}",
                cure="correct the function or task.params",
            ) from error
        if len(found) != count:
            raise LoraError(
                subject,
                reason=f"returned {len(found)} prompts of the {split} split instead of {count}",
                cure="return exactly as many as it is asked for, or ask for fewer",
            )
        examples = [self._example(one, subject) for one in found]
        self._refuse_overlap(split, examples, subject)
        return examples

    def score(self, example: Example, completion: str) -> float:
        """See `Task.score`."""
        section = self._section
        return guarded_score(self._reward, example, completion, name=section.reward, answer_tag=section.answer_tag)

    def _example(self, one: object, subject: str) -> Example:
        if isinstance(one, Example):
            return one
        if isinstance(one, Mapping) and isinstance(one.get("prompt"), str):
            answer = one.get("answer")
            return Example(prompt=one["prompt"], answer=None if answer is None else str(answer), source=one)
        raise LoraError(
            subject, reason=f"returned {one!r}", cure="return mappings with a text under 'prompt', or Examples"
        )

    def _refuse_overlap(self, split: Split, examples: list[Example], subject: str) -> None:
        other: Split = "eval" if split == "train" else "train"
        self._seen[split].update(example.prompt for example in examples)
        shared = self._seen["train"] & self._seen["eval"]
        if shared:
            raise LoraError(
                subject,
                reason=f"gave prompts of the {split} split that it also gave for {other}, e.g. {min(shared)[:80]!r}",
                cure="keep held-out prompts apart, e.g. by a hash of their text",
            )
