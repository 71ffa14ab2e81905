"""Fixtures of these tests, and which of the conformance checks the other megatron-core runs too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from qwen3_moe_tiny import make_checkpoint

# Below level 2, and of that one layout that splits every weight: the rest is the host's, which other plugins show.
_MATRIX = re.compile(r".*::TestOwnFactors::test_single\[|.*::TestOwnFactors::test_parallel\[tp2xep2xetp1\+sp-")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` deselects. The test methods are the kit's: a mark on them would be on those of every plugin."""
    for item in items:
        if item.path.name == "test_qwen3_moe_conformance.py" and _MATRIX.match(item.nodeid):
            item.add_marker(pytest.mark.mcore_matrix)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE as transformers saves it: one tensor per expert and projection."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Print a measured figure and record it in the test report."""

    def record(name: str, value: float) -> None:
        print(f"{name}: {value:.3g}")
        record_property(name, value)

    return record
