"""Prompts and a reward for runs that only have to move: the more even digits, the better."""

from __future__ import annotations

from lora_harness.tasks import Example

_EVEN = "02468"


def prompts(split: str, count: int, seed: int) -> list[Example]:
    offset = {"train": 0, "eval": 500}[split]
    return [Example(prompt=f"{(seed + offset + index) % 1000}+") for index in range(count)]


def reward(example: Example, completion: str) -> float:
    return sum(character in _EVEN for character in completion) / 6
