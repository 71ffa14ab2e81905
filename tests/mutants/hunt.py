"""Run the one case of the kit that must catch a mutant, and judge what it says."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from lora_plugins_sdk.testing.conformance import Case, Context, Finding, Result, cases, run_case
from mutants.mutant import Mutant
from mutants.subjects import SUBJECTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of a mutant.

    Args:
        mutant: the seeded fault.
        result: of the case that must fail.
        by: the first finding that names the right place; None while the mutant lives.
        misled: findings that blame another linear.
    """

    mutant: Mutant
    result: Result
    by: Finding | None
    misled: tuple[Finding, ...]

    @property
    def killed(self) -> bool:
        """Caught, and only where it was seeded."""
        return self.by is not None and not self.misled

    def explanation(self) -> str:
        """Why the mutant counts as alive."""
        said = "\n".join(f"  {one}" for one in self.result.findings[:8]) or "  nothing: the case passes"
        return f"{self.mutant.name} lives: {self.mutant.fault}\n{self.result.case.id} says:\n{said}"


def case_of(mutant: Mutant) -> Case:
    """The kit's case that must catch the mutant."""
    layouts = (mutant.layout,) if mutant.layout is not None else ()
    return next(one for one in cases(mutant.level, layouts) if one.id == mutant.case)


def hunt(mutant: Mutant) -> Verdict:
    """Seed the fault, run its case."""
    right = SUBJECTS[mutant.subject]
    # A subject of its own: what is looked up within the fault must not stay on the shared one.
    context = Context(
        replace(right.subject),
        around=None if mutant.here else mutant.around,
        world_seconds=mutant.seconds,
        snapshot=right.snapshot,
        how_to_update="no way, it is right",
    )
    with resolve_name(mutant.around)() if mutant.here else nullcontext():
        result = run_case(context, case_of(mutant))
    named = [one for one in result.findings if mutant.named_by(one)]
    misled = tuple(one for one in result.findings if mutant.misled_by(one))
    return Verdict(mutant=mutant, result=result, by=named[0] if named else None, misled=misled)
