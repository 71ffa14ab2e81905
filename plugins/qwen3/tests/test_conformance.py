"""Qwen3 through the conformance kit, as any plugin would."""

import pytest

from lora_plugins_sdk.testing import PluginConformance


@pytest.mark.world
@pytest.mark.mcore_matrix
class TestQwen3(PluginConformance):
    architecture = "qwen3"
