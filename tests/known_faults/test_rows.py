"""Every row that this table promises is guarded by tests and mutants that exist and say so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from mutants.catalogue import MUTANTS

from known_faults.rows import ROWS

ROOT = Path(__file__).parents[2]
PROMISED = range(1, 46)


@cache
def _docstrings(file: str) -> dict[str, str]:
    """Of each test function in a file, the file's own put before it."""
    tree = ast.parse((ROOT / file).read_text())
    head = ast.get_docstring(tree) or ""
    return {
        node.name: f"{head}\n{ast.get_docstring(node) or ''}" for node in tree.body if isinstance(node, ast.FunctionDef)
    }


def test_every_promised_row_is_there() -> None:
    assert list(ROWS) == [*(f"B{number}" for number in PROMISED), *(f"I{number}" for number in range(1, 6))]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_guarded(name: str) -> None:
    """By at least one test or mutant, each of which names the row."""
    row = ROWS[name]
    assert row.cure and (row.tests or row.mutants)
    for test in row.tests:
        file, function = test.split("::")
        assert function in _docstrings(file), f"{test} does not exist"
        assert re.search(rf"\b{name}\b", _docstrings(file)[function]), f"{test} does not name {name}"
    imitated = {mutant.name: mutant.imitates for mutant in MUTANTS}
    for mutant in row.mutants:
        assert mutant in imitated, f"there is no mutant {mutant}"
        assert re.search(rf"\b{name}\b", imitated[mutant]), f"{mutant} does not imitate {name}"
