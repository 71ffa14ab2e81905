"""The quickstart's task: sums of two three-digit numbers, such as "347+285=", and how to get them wrong."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import islice

from lora_harness.tasks import Example
from lora_plugins_sdk.errors import LoraError

SPLITS = ("train", "validation", "eval")
OPERANDS = range(100, 1000)

# Of 100 buckets of problems, by a hash of their text; training has the rest.
_EVAL_BUCKETS = range(0, 10)
_VALIDATION_BUCKETS = range(10, 15)


def split_of(prompt: str) -> str:
    """The split that a problem belongs to: the same on every machine, for every seed."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 100
    if bucket in _EVAL_BUCKETS:
        return "eval"
    return "validation" if bucket in _VALIDATION_BUCKETS else "train"


def prompts(split: str, count: int, seed: int) -> list[Example]:
    """`count` problems of a split, in an order that `seed` decides; a larger count begins with a smaller one's.

    Args:
        split: "train", "validation" (decides when the warm-up ends) or "eval" (held out).
        count: how many.
        seed: order.

    Raises:
        LoraError: unknown split.
    """
    if split not in SPLITS:
        raise LoraError(f"split {split!r}", reason="no such split", cure=f"use one of {', '.join(SPLITS)}")
    return list(islice(problems(split, seed), count))


def problems(split: str, seed: int) -> Iterator[Example]:
    """The endless sequence that `prompts` takes its problems from."""
    rng = random.Random(f"{seed}/{split}")
    while True:
        left, right = rng.choice(OPERANDS), rng.choice(OPERANDS)
        prompt = f"{left}+{right}="
        if split_of(prompt) == split:
            yield Example(prompt=prompt, answer=str(left + right))


def reward(example: Example, completion: str) -> float:
    """1 for exactly the digits of the sum, else 0."""
    return float(completion == example.answer)


def careless_answer(prompt: str, *, forget: float, rng: random.Random) -> str:
    """Column addition by someone who forgets to carry.

    Args:
        prompt: a problem such as "347+285=".
        forget: probability that a carry into the tens or the hundreds is forgotten, each on its own.
        rng: decides.
    """
    left, right = (int(operand) for operand in prompt.removesuffix("=").split("+"))
    written, carry = 0, 0
    for unit in (1, 10):
        column = left // unit % 10 + right // unit % 10 + carry
        written += column % 10 * unit
        carry = int(column >= 10 and rng.random() >= forget)
    return str(written + 100 * (left // 100 + right // 100 + carry))
