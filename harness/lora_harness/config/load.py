"""TOML files and dotted overrides in, TOML out."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from lora_harness.config.root import TrainConfig, parse_config
from lora_plugins_sdk.errors import LoraError


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a config file and apply ``a.b=value`` overrides.

    Args:
        path: a TOML file.
        overrides: as given to ``--set``; values are TOML (``8``, ``1e-4``, ``true``, ``["q_proj"]``), a text
            that is not TOML is taken as a string.

    Raises:
        LoraError: the file is absent or not TOML, an override is malformed, or the config is not usable (all
            problems).
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoraError(
            str(path), reason=f"cannot be read ({error.strerror})", cure="give an existing TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LoraError(str(path), reason=f"is not TOML: {error}", cure=_not_toml_cure(path)) from None
    apply_overrides(raw, overrides)
    return parse_config(raw, title=f"{path} cannot be used:")


def _not_toml_cure(path: Path) -> str:
    if path.suffix == ".toml":
        return "correct that line"
    return "write the config in TOML: `key = value`, and `[model]` before the keys of a table (docs/harness-config.md)"


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Write ``a.b=value`` overrides into `raw`, in place.

    Raises:
        LoraError: no ``=``, an empty key, a key given twice, or a key below a value that is not a table.
    """
    seen: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        names = key.split(".")
        if not equals or not all(names):
            raise LoraError(f"--set {override}", reason="is not KEY=VALUE", cure="write e.g. --set optimizer.lr=1e-4")
        if key in seen:
            raise LoraError(f"--set {override}", reason=f"{key} is set twice", cure="keep one of the two")
        seen.add(key)
        table = raw
        for depth, name in enumerate(names[:-1], start=1):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                parent = ".".join(names[:depth])
                raise LoraError(f"--set {override}", reason=f"{parent} is not a table", cure=f"set {parent} itself")
        table[names[-1]] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def dump_config(config: TrainConfig) -> str:
    """The resolved config as TOML. ``parse_config(tomllib.loads(dump_config(c))) == c``."""
    document = config.model_dump(mode="json", exclude_none=True)
    scalars = {key: value for key, value in document.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    return tomlkit.dumps({**scalars, **tables})
