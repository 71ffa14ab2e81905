"""Layouts: names, sizes, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing import Layout, current_run


@pytest.mark.parametrize(
    ("layout", "name", "world_size"),
    [
        (Layout(), "single", 1),
        (Layout(tp=2, sequence_parallel=True), "tp2+sp", 2),
        (Layout(tp=2, pp=2), "tp2xpp2", 4),
        (Layout(dp=3, cp=2), "dp3xcp2", 6),
        (Layout(dp=2, ep=2), "dp2xep2", 2),
        (Layout(tp=2, etp=1, sequence_parallel=True), "tp2xetp1+sp", 2),
    ],
    ids=str,
)
def test_name_and_world_size(layout: Layout, name: str, world_size: int) -> None:
    assert (str(layout), layout.world_size) == (name, world_size)


def test_a_layout_is_checked_like_run_facts() -> None:
    with pytest.raises(LoraError, match="sequence_parallel"):
        Layout(sequence_parallel=True)


def test_current_run_outside_a_world_names_the_way_out() -> None:
    with pytest.raises(LoraError, match="run_world"):
        current_run()


def test_collecting_tests_does_not_import_torch() -> None:
    """The parent of a world needs no torch; a test session that only collects stays fast."""
    program = "import sys, lora_plugins_sdk.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
