"""Every mutant is killed by the check that must, which names the right site; without a mutant the check passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lora_plugins_sdk.testing.conformance import Case, Context, Level, Subject, cases, run_case
from mutants.catalogue import MUTANTS
from mutants.hunt import SNAPSHOT, case_of, hunt
from mutants.mutant import Mutant
from mutants.table import row

ONE_PROCESS = [one for one in MUTANTS if one.level < Level.PARALLEL]
PARALLEL = [one for one in MUTANTS if one.level is Level.PARALLEL]
USED = {one.id: one for one in map(case_of, MUTANTS)}


def _name(one: Mutant | Case) -> str:
    return one.id


def _must_be_killed(mutant: Mutant, subject: Subject, record_property: Callable[[str, Any], None]) -> None:
    verdict = hunt(mutant, subject)
    record_property("mutant", row(verdict))
    assert verdict.killed, verdict.explanation()


@pytest.mark.world
@pytest.mark.parametrize("mutant", ONE_PROCESS, ids=_name)
def test_killed_in_one_process(mutant: Mutant, subject: Subject, record_property: Callable[[str, Any], None]) -> None:
    """A fault that a single rank, or no rank at all, can show."""
    _must_be_killed(mutant, subject, record_property)


@pytest.mark.world
@pytest.mark.parametrize("mutant", PARALLEL, ids=_name)
def test_killed_in_parallel(mutant: Mutant, subject: Subject, record_property: Callable[[str, Any], None]) -> None:
    """A fault that shows only where ranks share the work."""
    _must_be_killed(mutant, subject, record_property)


@pytest.fixture(scope="module")
def right(subject: Subject) -> Context:
    """The right plugin, observed once for all cases."""
    return Context(subject, snapshot=SNAPSHOT)


@pytest.mark.world
@pytest.mark.parametrize("case", USED.values(), ids=_name)
def test_the_right_plugin_passes(case: Case, right: Context) -> None:
    """In the same processes, after the mutants: each of these checks fails because of the mutant alone."""
    assert not run_case(right, case).findings


def test_the_catalogue() -> None:
    """Enough faults, each once; every check of the kit kills one of them, so none of them is idle."""
    assert len({one.name for one in MUTANTS}) >= 30
    assert len({one.id for one in MUTANTS}) == len(MUTANTS)
    of_the_kit = {case.check.name for level in (Level.STATIC, Level.SINGLE, Level.PARALLEL) for case in cases(level)}
    assert of_the_kit == {one.check for one in MUTANTS}
