"""Every option with its default and meaning, read off the config's models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.table import Column, Table
from rich.text import Text

from lora_harness.config.explain import models_of
from lora_harness.config.root import TrainConfig


def options() -> Iterator[tuple[str, str, str]]:
    """Dotted key, default and description of every option.

    The default is as TOML writes it, ``required``, or empty where an option is absent unless it is set. The options of
    a task are listed for each kind.
    """
    for name, field in TrainConfig.model_fields.items():
        members = models_of(field)
        if not members:
            yield name, _default(field), field.description or ""
        for member in members:
            yield from _section(name, member)


def _section(name: str, model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    kind = model.model_fields.get("kind")
    if kind is not None:
        yield f"{name}.kind", f'"{get_args(kind.annotation)[0]}"', "kind of task; it has the options below"
    for key, field in model.model_fields.items():
        if members := models_of(field):
            for member in members:
                yield from _section(f"{name}.{key}", member)
        elif key != "kind":
            yield f"{name}.{key}", _default(field), field.description or ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value: Any = str(field.default) if isinstance(field.default, Path) else field.default
    return "" if value is None else json.dumps(value)


def option_table() -> Table:
    """`options` for a terminal."""
    # A key in one piece, to be copied.
    option = Column("option", no_wrap=True)
    table = Table(option, "default", "meaning", title="Options of a training config (TOML; a.b is key b of table a)")
    last: str | None = None
    for key, default, meaning in options():
        table_name = key.rpartition(".")[0]
        if last not in (None, table_name) or key.endswith(".kind"):
            table.add_section()
        last = table_name
        table.add_row(*map(Text, (key, default, meaning)))
    return table
