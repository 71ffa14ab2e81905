"""`lora-plugins list`: every plugin that is installed, working or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins_sdk.cli.render import print_table
from lora_plugins_sdk.discovered import DiscoveredPlugin
from lora_plugins_sdk.discovery import discover

COLUMNS = ("NAME", "STATUS", "ARCHITECTURES", "MODEL TYPES", "DISTRIBUTION", "SOURCE")


def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a plugin.")] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option("--plugin", metavar="FILE", help="Also load this Python file; repeatable."),
    ] = None,
) -> None:
    """List the plugins found, their status and the model types they serve."""
    rows = discover(files=plugin or [])
    if as_json:
        print(json.dumps([as_record(row) for row in rows], indent=2))
        return
    if not rows:
        print("no plugins are installed")
        return
    print_table(COLUMNS, [_cells(row) for row in rows])
    for row in rows:
        if row.error is not None:
            print(f"{row.name}: {row.status}: {row.error}")


def as_record(row: DiscoveredPlugin) -> dict[str, Any]:
    """A row as JSON shows it."""
    return {
        "name": row.name,
        "status": str(row.status),
        "error": row.error,
        "distribution": row.distribution,
        "version": row.version,
        "source": row.source,
        "file": row.file,
        "requires_api": row.requires_api,
        "observer": row.is_observer,
        "architectures": [{"name": one.name, "model_types": list(one.model_types)} for one in row.architectures],
    }


def _cells(row: DiscoveredPlugin) -> tuple[str, ...]:
    architectures = "(observer)" if row.is_observer else ", ".join(one.name for one in row.architectures) or "-"
    model_types = ", ".join(row.model_types) or "-"
    distribution = "(file)" if row.distribution is None else f"{row.distribution} {row.version}"
    return (row.name, str(row.status), architectures, model_types, distribution, row.source)
