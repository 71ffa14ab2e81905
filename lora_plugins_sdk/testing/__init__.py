"""Tools to test plugins with: the conformance kit, and small gloo worlds that start their own ranks and never hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.testing.failure import Outcome, RankReport, WorldError
from lora_plugins_sdk.testing.layout import Layout, current_layout, current_run
from lora_plugins_sdk.testing.pool import close_pool
from lora_plugins_sdk.testing.world import run_world

if TYPE_CHECKING:
    from lora_plugins_sdk.testing.conformance.suite import PluginConformance


def __getattr__(name: str) -> Any:
    # Ranks and the command line use this package without pytest.
    if name != "PluginConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_plugins_sdk.testing.conformance.suite import PluginConformance

    return PluginConformance


__all__ = [
    "Layout",
    "Outcome",
    "PluginConformance",
    "RankReport",
    "WorldError",
    "close_pool",
    "current_layout",
    "current_run",
    "run_world",
]
