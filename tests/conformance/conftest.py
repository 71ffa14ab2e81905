"""Plugins that are right or wrong in one place, as single files."""

from __future__ import annotations

from pathlib import Path

import pytest

RIGHT = """
from lora_plugin_qwen3 import lora_build_model
from lora_plugin_qwen3.architecture import ARCHITECTURE
from lora_plugins_sdk import hookimpl


@hookimpl
def lora_register_architectures():
    return [ARCHITECTURE]
"""

WRONG_LAYER = """

@hookimpl
def lora_hf_name(row):
    module = row.hf_module if row.layer is None else row.hf_module.replace(f".{row.layer}.", f".{(row.layer + 1) % 4}.")
    return f"base_model.model.{module}.lora_{row.factor}.weight"
"""


@pytest.fixture
def right_plugin(tmp_path: Path) -> Path:
    """Qwen3's plugin in a file."""
    path = tmp_path / "right_plugin.py"
    path.write_text(RIGHT)
    return path


@pytest.fixture
def wrong_plugin(tmp_path: Path) -> Path:
    """The same, with each layer's factors under the next layer's names."""
    path = tmp_path / "wrong_plugin.py"
    path.write_text(RIGHT + WRONG_LAYER)
    return path


@pytest.fixture
def importable_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """`faults` of this folder as a module, in this process and in ranks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
