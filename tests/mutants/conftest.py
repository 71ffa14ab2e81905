"""What the hunts share, and their table at the end of a session."""

from __future__ import annotations

from typing import Any

PROPERTY = "mutant"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Mutant -> killed by which check, with which finding."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    rows = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if rows:
        from mutants.table import lines

        terminalreporter.section("mutants")
        for line in lines(rows):
            terminalreporter.write_line(line)
