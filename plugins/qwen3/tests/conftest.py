"""Checkpoints, adapters and the one-process result that other topologies are compared with; made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from qwen3_tiny import make_adapter, make_checkpoint
from qwen3_trainer import Report, train

from lora_plugins_sdk.testing import Layout, run_world


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untied Qwen3 as a HF directory."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A random adapter on all its projections, the head included, as a PEFT directory."""
    return make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint)


@pytest.fixture(scope="session")
def one_process(checkpoint: Path, adapter: Path) -> Report:
    """Three training steps in one process."""
    (report,) = run_world(train, Layout(), checkpoint, adapter)
    return report


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Print a measured figure and record it in the test report."""

    def record(name: str, value: float) -> None:
        print(f"{name}: {value:.3g}")
        record_property(name, value)

    return record
