"""Qwen3-MoE through the conformance kit, as any plugin would; adapters on experts in both layouts."""

from pathlib import Path
from typing import ClassVar

import pytest

from lora_plugins_sdk.testing import PluginConformance


@pytest.mark.world
class TestOwnFactors(PluginConformance):
    """Every expert has factors of its own."""

    architecture = "qwen3_moe"


@pytest.mark.world
class TestSharedOuter(PluginConformance):
    """Experts share the factor on the hidden side."""

    architecture = "qwen3_moe"
    options: ClassVar[dict[str, str]] = {"expert_sharing": "outer"}
    table_snapshot = Path(__file__).parent / "qwen3_moe_shared_outer.table.md"
