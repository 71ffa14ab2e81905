"""Picking the one plugin and architecture of a run, or saying why that is not possible."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_plugins_sdk.architecture import Architecture
from lora_plugins_sdk.discovered import DiscoveredPlugin, PluginStatus
from lora_plugins_sdk.discovery import discover
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.manager import SelectedPlugin, new_manager

WORKING = (PluginStatus.OK, PluginStatus.DUPLICATE)


def load_plugin(
    model_type: str | None = None,
    *,
    architecture: str | None = None,
    plugin: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> SelectedPlugin:
    """Discover plugins and select the one that serves a model type or an architecture.

    Args:
        model_type: `model_type` of the HF config; give this or `architecture`.
        architecture: an architecture's name.
        plugin: an installed plugin's name, `distribution:name`, or the path of a Python file. Needed when two
            plugins serve the same model.
        environ: stands in for `os.environ`.

    Raises:
        LoraError: nothing serves it, several plugins do, or the selected plugin is broken or disabled.
    """
    assert (model_type is None) != (architecture is None), "give model_type or architecture"
    by_path = plugin is not None and is_path(plugin)
    rows = discover(files=[Path(plugin)] if plugin is not None and by_path else [], environ=environ)
    wanted = f"model type {model_type!r}" if model_type is not None else f"architecture {architecture!r}"
    if by_path:
        chosen = rows[-1]
    elif plugin is not None:
        chosen = _by_name(rows, plugin)
    else:
        chosen = _by_claim(rows, wanted, architecture, model_type)
    _refuse_unusable(chosen)
    manager = new_manager()
    manager.register(chosen.plugin, chosen.name)
    for row in rows:
        if row is not chosen and row.status in WORKING and row.is_observer:
            manager.register(row.plugin, row.qualified_name)
    return SelectedPlugin(
        name=chosen.name,
        version=chosen.version or "",
        architecture=_architecture(chosen, wanted, model_type, architecture),
        manager=manager,
    )


def is_path(plugin: str) -> bool:
    """Whether a `--plugin` value is a file's path rather than an installed plugin's name."""
    return plugin.endswith(".py") or os.sep in plugin


def _by_name(rows: Sequence[DiscoveredPlugin], plugin: str) -> DiscoveredPlugin:
    hits = [row for row in rows if plugin in (row.name, row.qualified_name)]
    if not hits:
        raise LoraError(
            f"plugin {plugin!r}",
            reason=f"is not installed; installed: {', '.join(row.name for row in rows) or 'none'}",
            cure="install it, or give the path of a .py file",
        )
    if len(hits) > 1:
        raise LoraError(
            f"plugin {plugin!r}",
            reason=f"two plugins have this name: {' and '.join(row.origin for row in hits)}",
            cure=_choose(hits),
        )
    return hits[0]


def _choose(rows: Sequence[DiscoveredPlugin]) -> str:
    options = " or ".join(f"--plugin {row.qualified_name}" for row in rows)
    return f"use {options}; in a training config, model.plugin = {rows[0].qualified_name!r} or likewise"


def _by_claim(
    rows: Sequence[DiscoveredPlugin], wanted: str, architecture: str | None, model_type: str | None
) -> DiscoveredPlugin:
    hits = [row for row in rows if row.status in WORKING and wanted in row.claims()]
    if len(hits) > 1:
        raise LoraError(
            wanted,
            reason=f"claimed by {' and '.join(row.origin for row in hits)}",
            cure=_choose(hits),
        )
    if hits:
        return hits[0]
    # The plugin of that very name exists but does not load or is switched off: say that, not "unknown".
    namesakes = [row for row in rows if row.name == architecture]
    if namesakes:
        return namesakes[0]
    for one in (one for row in rows if row.status in WORKING for one in row.architectures):
        if model_type is not None and model_type in one.refuses:
            raise LoraError(
                wanted,
                reason=f"is not served by {one.name}: {one.refuses[model_type]}",
                cure="use a model that is served (`lora-plugins list`), or write a plugin (docs/writing-a-plugin.md)",
            )
    kind = wanted.split("'")[0]
    served = sorted(claim for row in rows if row.status in WORKING for claim in row.claims() if claim.startswith(kind))
    unusable = [f"{row.name} is {row.status}" for row in rows if row.status not in WORKING]
    raise LoraError(
        wanted,
        reason="no plugin serves it; there is " + ", ".join([*served, *unusable] or ["no plugin at all"]),
        cure="install this model's plugin or write one (docs/writing-a-plugin.md); see `lora-plugins doctor`",
    )


def _refuse_unusable(row: DiscoveredPlugin) -> None:
    if row.status is PluginStatus.BROKEN:
        if row.distribution is None:  # a file, which `doctor` does not see
            cure = f"repair it; `python {row.source}` shows the traceback of an import that fails"
        else:
            cure = f"update or reinstall {row.distribution}; `lora-plugins doctor` shows where it fails"
        raise LoraError(
            f"plugin {row.origin}",
            reason=f"is broken: {row.error}",
            cure=cure,
        )
    if row.status is PluginStatus.DISABLED:
        raise LoraError(f"plugin {row.origin}", reason=f"is disabled: {row.error}", cure="change that variable")


def _architecture(row: DiscoveredPlugin, wanted: str, model_type: str | None, architecture: str | None) -> Architecture:
    for one in row.architectures:
        if one.name == architecture or (model_type is not None and model_type in one.model_types):
            return one
    raise LoraError(
        f"plugin {row.origin}",
        reason=f"does not serve {wanted}; it serves model types {', '.join(row.model_types) or 'none'}",
        cure="choose another plugin or another model",
    )
