"""Sites x checks: which linears each check measured, so that one which nobody exercises is seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_plugins_sdk.testing.conformance.check import Result, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Counts of measured host modules.

    Args:
        sites: declared site path -> number of host modules that the tiny model has of it.
        rows: check -> (how its cases ended, measured modules of each site in the order of `sites`).
    """

    sites: Mapping[str, int]
    rows: Mapping[str, tuple[str, tuple[int, ...]]]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: `all`, `2/4` or `-` for each check and site."""
        header = ["CHECK", "RESULT", *(path.rsplit(".", 1)[-1] for path in self.sites)]
        body = [
            [name, ended, *(_share(count, total) for count, total in zip(counts, self.sites.values(), strict=True))]
            for name, (ended, counts) in self.rows.items()
        ]
        return header, body

    def unseen(self) -> list[str]:
        """Declared sites of which no check measured anything."""
        columns = zip(*(counts for _, counts in self.rows.values()), strict=True) if self.rows else []
        seen = [any(column) for column in columns] or [False] * len(self.sites)
        return [path for path, one in zip(self.sites, seen, strict=True) if not one]


def coverage_of(sites: Mapping[str, Sequence[str]], results: Iterable[Result]) -> Coverage:
    """Coverage of these results.

    Args:
        sites: host modules of each declared site (`Subject.site_modules`).
        results: cases that measured nothing, because they were not run or failed at once, count nothing.
    """
    measured: dict[str, set[str]] = {}
    ended: dict[str, list[Status]] = {}
    for one in results:
        measured.setdefault(one.case.check.name, set()).update(one.sites)
        ended.setdefault(one.case.check.name, []).append(one.status)
    rows = {
        name: (_ended(ended[name]), tuple(len(modules.intersection(own)) for own in sites.values()))
        for name, modules in measured.items()
    }
    return Coverage(sites={path: len(modules) for path, modules in sites.items()}, rows=rows)


def _ended(statuses: Sequence[Status]) -> str:
    """`passed` where all cases did, else how many ended in which way."""
    kinds = list(dict.fromkeys(statuses))
    if len(kinds) == 1:
        return str(kinds[0])
    return ", ".join(f"{statuses.count(kind)} {kind}" for kind in kinds)


def _share(count: int, total: int) -> str:
    if not total:
        return "none"
    return "-" if not count else "all" if count == total else f"{count}/{total}"
