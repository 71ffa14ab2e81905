"""What a task is: prompts, and a score for a completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol, overload

Split = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One prompt and what is needed to score its completions.

    Args:
        prompt: the bare prompt; templates are put around it later.
        answer: the right answer, or None where a reward function needs none.
        source: the row or entry it was made from, for reward functions that need more.
    """

    prompt: str
    answer: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Prompts with a reward. Training and held-out prompts are disjoint."""

    def prompts(self, split: Split, count: int, seed: int) -> Sequence[Example]:
        """`count` examples of a split in an order that `seed` decides.

        The same arguments give the same examples on every rank and in every run, and a larger count begins
        with the examples of a smaller one. The sequence may produce its examples only when they are read.

        Raises:
            LoraError: the split has no example, or too few.
        """
        ...

    def score(self, example: Example, completion: str) -> float:
        """Reward of a completion's text, a finite number.

        Raises:
            LoraError: the reward function raised, or returned something else than a finite number.
        """
        ...


class LazyExamples(Sequence[Example]):
    """`count` examples from an iterator, produced when first read and then kept."""

    def __init__(self, count: int, examples: Iterator[Example]) -> None:
        self._count = count
        self._rest = examples
        self._made: list[Example] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        wanted = range(self._count)[index]  # raises IndexError, and turns negative indices positive
        last = wanted if isinstance(wanted, int) else max(wanted, default=-1)
        self._made.extend(islice(self._rest, max(0, last + 1 - len(self._made))))
        return self._made[wanted] if isinstance(wanted, int) else [self._made[one] for one in wanted]
