"""A check is data: its level, what it proves, what it needs, and the function that measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.layout import Layout

if TYPE_CHECKING:
    from lora_plugins_sdk.testing.conformance.context import Context


class Level(IntEnum):
    """What a check has to start."""

    STATIC = 0
    SINGLE = 1
    PARALLEL = 2
    DEVICE = 3

    @property
    def title(self) -> str:
        """The level in words."""
        return (
            "L0 static, without torch",
            "L1 one process against transformers and PEFT",
            "L2 parallel layouts against one process",
            "L3 GPU, Transformer Engine",
        )[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One property of a plugin.

    Args:
        name: short and unique, for example `gradients`.
        level: what it has to start.
        proves: one sentence: what is true of a plugin that passes.
        run: measures and yields what is wrong; takes the context, and the layout at level PARALLEL.
        needs: capabilities without which it cannot pass; a layout adds its own.
        unavailable: why it cannot be run here, or None; such a check is reported as not run, never as passed.
    """

    name: str
    level: Level
    proves: str
    run: Callable[..., Iterable[Finding]]
    needs: tuple[str, ...] = ()
    unavailable: Callable[[Context], str | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One check in one layout."""

    check: Check
    layout: Layout | None = None
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """`no-op`, or `tp2+sp-gradients` in a layout."""
        return self.check.name if self.layout is None else f"{self.layout}-{self.check.name}"

    def measure(self, context: Context) -> list[Finding]:
        """Run the check."""
        return list(self.check.run(context) if self.layout is None else self.check.run(context, self.layout))


class Status(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    LACKING = "fails as declared"
    UNEXPECTED_PASS = "passes although declared as lacking"
    NOT_RUN = "not run"

    @property
    def good(self) -> bool:
        """Whether the plugin conforms as far as this case can tell."""
        return self not in (Status.FAILED, Status.UNEXPECTED_PASS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One case, measured.

    Args:
        case: what was run.
        status: how it ended.
        findings: what is wrong; kept also where the plugin declares that it lacks the capability.
        reason: why it was not run, or the plugin's own words on what it lacks.
        seconds: wall time; a cost that several cases share falls on the first.
        sites: host modules whose values were measured.
    """

    case: Case
    status: Status
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    sites: frozenset[str] = frozenset()

    def record(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "check": self.case.check.name,
            "level": int(self.case.check.level),
            "layout": None if self.case.layout is None else str(self.case.layout),
            "status": str(self.status),
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "findings": [
                {name: getattr(one, name) for name in Finding.__slots__} | {"text": str(one)} for one in self.findings
            ],
            "sites": sorted(self.sites),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], case: Case) -> Result:
        """The inverse of `record`, for a record of this case."""
        findings = [{name: one[name] for name in Finding.__slots__} for one in record["findings"]]
        return cls(
            case=case,
            status=Status(record["status"]),
            findings=tuple(Finding(**one) for one in findings),
            reason=record["reason"],
            seconds=record["seconds"],
            sites=frozenset(record["sites"]),
        )
