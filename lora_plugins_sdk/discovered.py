"""What is known of one plugin after discovery, working or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lora_plugins_sdk.architecture import Architecture


class PluginStatus(StrEnum):
    """Outcome of discovery. `duplicate`: it works, but another plugin claims one of its names."""

    OK = "ok"
    BROKEN = "broken"
    DISABLED = "disabled"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveredPlugin:
    """One plugin.

    Args:
        name: the entry point's name, or a file's stem.
        distribution: the installed distribution that brings it; None for a file.
        version: that distribution's version; None for a file.
        source: the entry point's value (`module` or `module:object`), or the path as it was given.
        file: file of its module or package; None when there is no such module.
        status: outcome of discovery.
        error: why it is not `ok`; None when it is.
        traceback: where a broken plugin failed; None otherwise.
        requires_api: hook API the plugin asks for; None when it does not say.
        architectures: what it registers; empty for an observer and for a plugin that did not load.
        plugin: the loaded module or object; None when it did not load.
    """

    name: str
    distribution: str | None
    version: str | None
    source: str
    file: str | None
    status: PluginStatus
    error: str | None = None
    traceback: str | None = field(default=None, repr=False)
    requires_api: tuple[int, int] | None = None
    architectures: tuple[Architecture, ...] = ()
    plugin: object | None = field(default=None, repr=False, compare=False)

    @property
    def is_observer(self) -> bool:
        """Whether it watches every run instead of serving a model."""
        return bool(getattr(self.plugin, "lora_observer", False))

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of `model_type` in HF configs that it serves."""
        return tuple(model_type for one in self.architectures for model_type in one.model_types)

    @property
    def origin(self) -> str:
        """Name and whereabouts, for messages: `qwen3 (lora-plugins-sdk 0.1.0, /path/__init__.py)`."""
        where = self.file or self.source
        return (
            f"{self.name} ({where})" if self.distribution is None else f"{self.qualified_name} {self.version} ({where})"
        )

    @property
    def qualified_name(self) -> str:
        """`distribution:name`, which tells apart two plugins of one name."""
        return self.name if self.distribution is None else f"{self.distribution}:{self.name}"

    def claims(self) -> Iterable[str]:
        """The names it claims for itself alone, in words."""
        yield f"plugin name {self.name!r}"
        for architecture in self.architectures:
            yield f"architecture {architecture.name!r}"
            yield from (f"model type {model_type!r}" for model_type in architecture.model_types)


def mark_duplicates(found: Iterable[DiscoveredPlugin]) -> tuple[DiscoveredPlugin, ...]:
    """The rows, `duplicate` where another working row claims the same name; each names the other."""
    rows = tuple(found)
    working = [row for row in rows if row.status is PluginStatus.OK]
    return tuple(_marked(row, [other for other in working if other is not row]) for row in rows)


def _marked(row: DiscoveredPlugin, others: list[DiscoveredPlugin]) -> DiscoveredPlugin:
    if row.status is not PluginStatus.OK:
        return row
    mine = tuple(row.claims())
    clashes = [
        f"{claim} is also claimed by {other.origin}" for other in others for claim in other.claims() if claim in mine
    ]
    if not clashes:
        return row
    return replace(row, status=PluginStatus.DUPLICATE, error="; ".join(clashes))
