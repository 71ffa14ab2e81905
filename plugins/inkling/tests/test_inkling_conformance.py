"""Inkling through the conformance kit, as any plugin would; adapters on routed experts in both layouts."""

from pathlib import Path
from typing import ClassVar

import pytest

from lora_plugins_sdk.testing import PluginConformance


@pytest.mark.world
class TestOwnFactors(PluginConformance):
    """Every routed expert has factors of its own."""

    architecture = "inkling"


@pytest.mark.world
class TestSharedOuter(PluginConformance):
    """Routed experts share the factor on the hidden side, as in the official schema."""

    architecture = "inkling"
    options: ClassVar[dict[str, str]] = {"expert_sharing": "outer"}
    table_snapshot = Path(__file__).parent / "inkling_shared_outer.table.md"
