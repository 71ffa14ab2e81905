"""Prompts from reasoning-gym's procedural generators, scored by their own verifiers."""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from lora_harness.config.tasks import ReasoningGymTask as Section
from lora_harness.tasks.base import Example, LazyExamples, Split
from lora_harness.tasks.scoring import guarded_score
from lora_plugins_sdk.errors import LoraError

# Of EVAL_OF hash buckets of questions one is held out.
EVAL_OF = 5
# Entries made by one data set object: some prepare all of theirs at once, some refuse large numbers.
CHUNK = 500
# Items in a row that belong to the other split, after which a generator is taken to have no question of this
# one.
MAX_MISSES = 1000


def split_of(question: str) -> Split:
    """The split of a question, by a hash of its text: the same in every run, so that none is ever in both."""
    digest = hashlib.sha256(question.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_OF == 0 else "train"


class ReasoningGymTask:
    """A reasoning-gym data set.

    Raises:
        LoraError: unknown data set, unknown option, or a value that the data set refuses.
    """

    def __init__(self, section: Section) -> None:
        from reasoning_gym.factory import DATASETS

        self._section = section
        name = section.dataset
        if name not in DATASETS:
            close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
            raise LoraError(
                f"task.dataset = {name!r}",
                reason=f"is none of reasoning-gym's {len(DATASETS)} data sets",
                cure=f"did you mean {' or '.join(map(repr, close))}?" if close else f"use one of {', '.join(DATASETS)}",
            )
        known = [one.name for one in fields(DATASETS[name][1]) if one.name not in ("seed", "size")]
        for key in section.params:
            if key not in known:
                raise LoraError(
                    f"task.params.{key}", reason=f"is no option of {name}", cure=f"use one of {', '.join(known)}"
                )
        self._scorer = self._create(seed=0)
        self._warned = False

    def prompts(self, split: Split, count: int, seed: int) -> Sequence[Example]:
        """See `Task.prompts`. Examples are generated when read."""
        # The generators make item i from seed + i, so neighbouring seeds would share nearly all their items.
        spread = int.from_bytes(hashlib.sha256(f"{seed}/{split}".encode()).digest()[:4], "big") >> 1
        return LazyExamples(count, self._generate(split, spread))

    def score(self, example: Example, completion: str) -> float:
        """See `Task.score`."""

        name = f"of reasoning-gym's {self._section.dataset}"
        tag = self._section.answer_tag
        return guarded_score(self._verify, example, completion, name=name, answer_tag=tag)

    def _verify(self, example: Example, answer: str) -> object:
        try:
            return self._scorer.score_answer(answer.strip(), entry=example.source)
        except Exception as error:
            # Several of the library's verifiers assume an answer of the right form; an untrained model gives
            # others.
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._section.dataset}'s verifier raised {type(error).__name__}: {error} on {answer[:80]!r}; "
                    "such completions score 0",
                    stacklevel=2,
                )
            return 0.0

    def _create(self, *, seed: int) -> Any:
        from reasoning_gym.factory import create_dataset

        try:
            return create_dataset(self._section.dataset, **self._section.params, seed=seed, size=CHUNK)
        except Exception as error:
            raise LoraError(
                "task.params",
                reason=f"{self._section.dataset} refuses {self._section.params}: {error or type(error).__name__}",
                cure="change the option that it names, or remove it to use the data set's default",
            ) from error

    def _entries(self, seed: int) -> Iterator[dict[str, Any]]:
        while True:
            dataset = self._create(seed=seed)
            for index in range(CHUNK):
                try:
                    entry = dataset[index]
                except Exception as error:
                    raise LoraError(
                        f"task.dataset = {self._section.dataset!r}",
                        reason=f"its generator raised {type(error).__name__}: {error}",
                        cure="use fewer prompts or other task.params",
                    ) from error
                yield entry
            seed += CHUNK

    def _generate(self, split: Split, seed: int) -> Iterator[Example]:
        misses = 0
        for entry in self._entries(seed):
            if split_of(entry["question"]) == split:
                misses = 0
                yield Example(prompt=entry["question"], answer=str(entry["answer"]), source=entry)
            elif (misses := misses + 1) == MAX_MISSES:
                raise LoraError(
                    f"task.dataset = {self._section.dataset!r}",
                    reason=f"has too few different questions: {MAX_MISSES} in a row are not in the {split} split",
                    cure="widen task.params",
                )
