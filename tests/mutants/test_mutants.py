"""Every mutant is killed by the check that must, which names the right site; without a mutant the check passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from lora_plugins_sdk.testing.conformance import Case, Context, Level, cases, run_case
from lora_plugins_sdk.testing.conformance.layouts import layouts_of
from mutants.catalogue import MUTANTS
from mutants.hunt import case_of, hunt
from mutants.mutant import Mutant
from mutants.subjects import SUBJECTS
from mutants.table import row

ONE_PROCESS = [one for one in MUTANTS if one.level < Level.PARALLEL]
PARALLEL = [one for one in MUTANTS if one.level is Level.PARALLEL]
USED = {(one.subject, case_of(one).id): case_of(one) for one in MUTANTS}


def _name(one: Mutant | Case | str) -> str:
    return one if isinstance(one, str) else one.id


def _must_be_killed(mutant: Mutant, record_property: Callable[[str, Any], None]) -> None:
    verdict = hunt(mutant)
    record_property("mutant", row(verdict))
    assert verdict.killed, verdict.explanation()


@pytest.mark.world
@pytest.mark.parametrize("mutant", ONE_PROCESS, ids=_name)
def test_killed_in_one_process(mutant: Mutant, record_property: Callable[[str, Any], None]) -> None:
    """A fault that a single rank, or no rank at all, can show."""
    _must_be_killed(mutant, record_property)


@pytest.mark.world
@pytest.mark.parametrize("mutant", PARALLEL, ids=_name)
def test_killed_in_parallel(mutant: Mutant, record_property: Callable[[str, Any], None]) -> None:
    """A fault that shows only where ranks share the work."""
    _must_be_killed(mutant, record_property)


@cache
def _right(subject: str) -> Context:
    """The right plugin, observed once for all cases."""
    return Context(SUBJECTS[subject].subject, snapshot=SUBJECTS[subject].snapshot)


@pytest.mark.world
@pytest.mark.parametrize(("subject", "case"), [(key[0], case) for key, case in USED.items()], ids=_name)
def test_the_right_plugin_passes(subject: str, case: Case) -> None:
    """In the same processes, after the mutants: each of these checks fails because of the mutant alone."""
    assert not run_case(_right(subject), case).findings


def test_the_catalogue() -> None:
    """Enough faults, each once; every check of the kit kills one of them, so none of them is idle."""
    assert len({one.name for one in MUTANTS}) >= 30
    assert len({one.id for one in MUTANTS}) == len(MUTANTS)
    for one in MUTANTS:
        layouts = layouts_of(SUBJECTS[one.subject].subject.selected.architecture)
        assert one.layout is None or one.layout in layouts, f"the kit does not check {one.subject} in {one.layout}"
    of_the_kit = {case.check.name for level in (Level.STATIC, Level.SINGLE, Level.PARALLEL) for case in cases(level)}
    assert of_the_kit == {one.check for one in MUTANTS}
