"""Rewards that a model earns by chance, so that groups differ and there is something to learn."""

from __future__ import annotations

from lora_harness.tasks import Example


def first_digit_is_even(example: Example, completion: str) -> float:
    """1 for a completion that begins with an even digit."""
    return float(completion[:1] in tuple("02468"))
