"""The pytest plugin: options of the conformance kit, and its summary at the end of a session.

pytest loads it wherever this package is installed; it imports the kit only once a conformance test has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_METHODS = ("test_static", "test_single", "test_parallel", "test_device")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--conformance-level` and `--update-table-snapshot`."""
    group = parser.getgroup("lora-plugins", "conformance kit of lora-plugins")
    group.addoption(
        "--conformance-level",
        type=int,
        choices=range(len(_METHODS)),
        default=len(_METHODS) - 1,
        help="highest level to run: 0 static, 1 one process, 2 parallel layouts, 3 GPU [3]",
    )
    group.addoption(
        "--update-table-snapshot", action="store_true", help="write the accepted parameter table of each suite"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker `conformance`."""
    config.addinivalue_line("markers", "conformance: a check of the plugin conformance kit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect checks above `--conformance-level`."""
    highest = int(config.getoption("--conformance-level") or 0)
    above = [item for item in items if _level(item) > highest]
    if above:
        config.hook.pytest_deselected(items=above)
        items[:] = [item for item in items if item not in above]


def _level(item: pytest.Item) -> int:
    if item.get_closest_marker("conformance") is None:
        return 0
    return _METHODS.index(item.name.partition("[")[0])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """For each suite: counts, sites x checks, what was not run and why."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    records = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "lora_conformance"
    ]
    if not records:
        return
    from lora_plugins_sdk.testing.conformance.terminal import suite_lines

    level = terminalreporter.config.getoption("--conformance-level")
    for suite in dict.fromkeys(record["suite"] for record in records):
        terminalreporter.section(f"conformance of {suite}")
        for line in suite_lines([record for record in records if record["suite"] == suite], level):
            terminalreporter.write_line(line)
