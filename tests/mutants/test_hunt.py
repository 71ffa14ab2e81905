"""The hunt's own judgement: a mutant that nobody noticed, or that another linear was blamed for, is alive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mutants.catalogue import MUTANTS
from mutants.hunt import hunt
from mutants.mutant import Mutant

TORN_PAIR = next(one for one in MUTANTS if one.name == "factors-on-two-linears")


def test_a_fault_that_is_caught_where_it_is() -> None:
    assert hunt(TORN_PAIR).killed


@pytest.mark.parametrize(
    "expected",
    [
        replace(TORN_PAIR, site="decoder.layers.0.mlp.linear_fc1"),
        replace(TORN_PAIR, site=None, words="pair"),
        replace(TORN_PAIR, factor="A"),
        replace(TORN_PAIR, words="transposed"),
    ],
    ids=["another-site", "no-site", "factor-not-named", "another-cause"],
)
def test_a_finding_that_says_something_else_is_no_kill(expected: Mutant) -> None:
    assert not hunt(expected).killed


def test_a_harmless_change_lives() -> None:
    verdict = hunt(replace(TORN_PAIR, around="contextlib:nullcontext"))
    assert not verdict.killed and "nothing: the case passes" in verdict.explanation()


def test_a_crash_is_no_kill() -> None:
    """A fault in the mutant itself must not pass for one that the kit found."""
    broken = replace(TORN_PAIR, around="mutants.test_hunt:broken", here=False)
    assert not hunt(broken).killed


def broken() -> None:
    raise AttributeError("the seam is gone")
