"""Rewards: the built-in scorers, and the guard around every scorer."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable

from lora_harness.tasks.base import Example
from lora_harness.tasks.imports import import_function
from lora_plugins_sdk.errors import LoraError

RewardFunction = Callable[[Example, str], object]


def exact(example: Example, completion: str) -> float:
    """1 when the completion equals the answer, white space at both ends aside, else 0."""
    assert example.answer is not None
    return float(completion.strip() == example.answer.strip())


def math_verify(example: Example, completion: str) -> float:
    """1 when math-verify finds the completion's mathematics equal to the answer's, else 0.

    Plain numbers are found anywhere in a completion; other expressions must stand in ``$...$`` or
    ``\\boxed{...}``.

    Raises:
        ValueError: the answer is not mathematics.
    """
    from math_verify import parse, verify

    assert example.answer is not None
    # Unmarked, `x + 1` would be read as the number in it.
    marked = any(mark in example.answer for mark in ("$", "\\boxed", "\\(", "\\["))
    answer = parse(example.answer if marked else f"${example.answer}$")
    if all(isinstance(form, str) for form in answer):  # nothing but the text itself
        raise ValueError(f"math-verify finds no mathematics in the answer {example.answer!r}")
    return float(verify(answer, parse(completion)))


def find_scorer(name: str, *, key: str) -> RewardFunction:
    """``exact``, ``math_verify``, or the function at ``module:function``."""
    built_in: dict[str, RewardFunction] = {"exact": exact, "math_verify": math_verify}
    return built_in[name] if name in built_in else import_function(name, key=key)


def tagged_answer(completion: str, tag: str) -> str | None:
    """Text of the last ``<tag>...</tag>``, stripped, or None when there is none."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, flags=re.DOTALL)
    return found[-1].strip() if found else None


def guarded_score(
    function: RewardFunction, example: Example, completion: str, *, name: str, answer_tag: str | None
) -> float:
    """The reward of a completion, certainly a finite number.

    Args:
        function: called with the example and the completion, or with the text in its last answer tag.
        name: what errors call the function.
        answer_tag: when given, only the tag's content is scored, and a completion without the tag gets 0.

    Raises:
        LoraError: the function raised or returned anything but a finite real number.
    """
    text = completion if answer_tag is None else tagged_answer(completion, answer_tag)
    if text is None:
        return 0.0
    where = f"for the prompt {_short(example.prompt)} and the completion {_short(text)}"
    try:
        reward = function(example, text)
    except Exception as error:
        raise LoraError(
            f"reward function {name}",
            reason=f"raised {type(error).__name__}: {error} {where}",
            cure="make it return a number for every completion, e.g. 0.0 for one it cannot read",
        ) from error
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise LoraError(
            f"reward function {name}",
            reason=f"returned {reward!r} {where}",
            cure="make it return a finite float for every completion",
        )
    return float(reward)


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else f"{text[: limit - 3]}...")
