"""A mutant is data: the fault, whose fault it imitates, and which finding of which check must catch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lora_plugins_sdk.testing import Layout
from lora_plugins_sdk.testing.conformance import Finding, Level

Factory = Callable[[], AbstractContextManager[None]]
_ATTRIBUTE = "mutants"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One seeded fault, and one check that must catch it.

    Args:
        name: of the fault, in words.
        fault: what it does.
        imitates: row of the list of known faults, or the mistake in words.
        around: `package.module:factory` of the context manager that seeds it.
        level: where the kit must catch it.
        check: the check that must fail.
        layout: of that check, at level PARALLEL.
        site: wildcard for the host linears that findings may name; None when the fault is of no single site.
        factor: the factor that findings must name; None when the fault is of no single factor.
        words: must be in the text of a finding that names the site.
        here: the check measures in the test's own process, so the fault is seeded there.
        seconds: after which a world that hangs is ended.
        subject: what the fault is seeded into, by its name in `mutants.subjects`.
    """

    name: str
    fault: str
    imitates: str
    around: str
    level: Level
    check: str
    layout: Layout | None
    site: str | None
    factor: str | None
    words: str
    here: bool
    seconds: float
    subject: str

    @property
    def id(self) -> str:
        """Unique: the fault and the case."""
        return f"{self.name}-by-{self.case}"

    @property
    def case(self) -> str:
        """The kit's case that must fail, as the kit names it."""
        return self.check if self.layout is None else f"{self.layout}-{self.check}"

    def named_by(self, finding: Finding) -> bool:
        """Whether a finding names the right place, factor and cause."""
        if self.site is None:
            place = finding.site is None
        else:
            place = finding.site is not None and fnmatchcase(finding.site, self.site)
        factor = self.factor is None or finding.factor == self.factor
        return place and factor and self.words in str(finding)

    def misled_by(self, finding: Finding) -> bool:
        """Whether a finding blames another linear."""
        return finding.site is not None and not fnmatchcase(finding.site, self.site or "")


def seeded(
    check: str,
    layout: Layout | None = None,
    *,
    level: Level | None = None,
    imitates: str = "",
    site: str | None = None,
    factor: str | None = None,
    words: str = "",
    here: bool = False,
    seconds: float = 60.0,
    subject: str = "qwen3",
) -> Callable[[Callable[[], Iterator[None]] | Factory], Factory]:
    """Make a generator function a mutant; its docstring says what it does. See `Mutant` for the arguments.

    Put on a mutant once more, it names a further check that must catch the same fault.

    Args:
        level: SINGLE, or PARALLEL with a layout, when not given.
        imitates: that of the check below when not given.
    """

    def decorate(function: Callable[[], Iterator[None]] | Factory) -> Factory:
        known: list[Mutant] = getattr(function, _ATTRIBUTE, [])
        factory: Any = function if known else contextmanager(function)  # type: ignore[arg-type]
        assert factory.__doc__, f"{factory.__name__} does not say what it does"
        assert site or words, "any failure, a crash too, would count as a kill"
        mutant = Mutant(
            name=factory.__name__.replace("_", "-"),
            fault=factory.__doc__,
            imitates=imitates or known[0].imitates,
            around=f"{factory.__module__}:{factory.__name__}",
            level=level if level is not None else Level.SINGLE if layout is None else Level.PARALLEL,
            check=check,
            layout=layout,
            site=site,
            factor=factor,
            words=words,
            here=here or level is Level.STATIC,
            seconds=seconds,
            subject=subject,
        )
        setattr(factory, _ATTRIBUTE, [*known, mutant])
        return factory

    return decorate


def mutants_of(module: object) -> list[Mutant]:
    """The mutants of one module, in the order in which they stand there."""
    return [mutant for one in vars(module).values() for mutant in getattr(one, _ATTRIBUTE, [])]
