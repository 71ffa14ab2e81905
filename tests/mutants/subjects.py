"""The right plugins that faults are seeded into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_plugins_sdk.testing.conformance import Subject

_PLUGINS = Path(__file__).parents[2] / "plugins"


@dataclass(frozen=True, kw_only=True)
class Right:
    """One plugin as it should be.

    Args:
        architecture: its name.
        table: its accepted parameter table, below `plugins`.
        options: other numbers than the kit's own.
    """

    architecture: str
    table: str
    options: dict[str, Any]

    @cached_property
    def subject(self) -> Subject:
        """What the kit is given."""
        return Subject.of(self.architecture, **self.options)

    @property
    def snapshot(self) -> Path:
        """The accepted table's file."""
        return _PLUGINS / self.table


SUBJECTS = {
    "qwen3": Right(architecture="qwen3", table="qwen3/tests/qwen3.table.md", options={}),
    "qwen3-moe": Right(architecture="qwen3_moe", table="qwen3_moe/tests/qwen3_moe.table.md", options={}),
    "hybrid": Right(architecture="qwen36_moe", table="qwen36_moe/tests/qwen36_moe.table.md", options={}),
    "shared-outer": Right(
        architecture="qwen36_moe",
        table="qwen36_moe/tests/shared_outer.table.md",
        options={"expert_sharing": "outer"},
    ),
    "inkling": Right(
        architecture="inkling",
        table="inkling/tests/inkling_shared_outer.table.md",
        options={"expert_sharing": "outer"},
    ),
}
