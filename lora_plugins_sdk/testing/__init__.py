"""Tools to test plugins with: small gloo worlds that start their own ranks and never hang."""

from lora_plugins_sdk.testing.failure import Outcome, RankReport, WorldError
from lora_plugins_sdk.testing.layout import Layout, current_layout, current_run
from lora_plugins_sdk.testing.pool import close_pool
from lora_plugins_sdk.testing.world import run_world

__all__ = [
    "Layout",
    "Outcome",
    "RankReport",
    "WorldError",
    "close_pool",
    "current_layout",
    "current_run",
    "run_world",
]
