"""Finding plugins: installed ones through the entry-point group `lora_plugins`, single files by path.

Every entry point is loaded behind a guard of its own: a broken plugin is a row with its reason, and the others
load all the same. `selection` picks one of the rows for a run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_plugins_sdk.discovered import DiscoveredPlugin, PluginStatus, mark_duplicates
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.examine import architectures_of, check_api
from lora_plugins_sdk.module_files import import_file
from lora_plugins_sdk.trace import trace_wanted

GROUP = "lora_plugins"
LOAD_VARIABLE = "LORA_PLUGINS_LOAD"
DISABLE_VARIABLE = "LORA_PLUGINS_DISABLE"


def discover(
    *, files: Sequence[str | Path] = (), environ: Mapping[str, str] | None = None
) -> tuple[DiscoveredPlugin, ...]:
    """Every installed plugin, sorted by name, then those of `files`, each with its status.

    Args:
        files: Python files that hold a plugin each, without packaging.
        environ: stands in for `os.environ`. `LORA_PLUGINS_LOAD=a,b` loads those alone,
            `LORA_PLUGINS_DISABLE=c` leaves `c` out; what is left out is not imported and shows as `disabled`.

    Raises:
        LoraError: a file does not exist, a variable names a plugin that is not installed or has no meaning.
    """
    environ = os.environ if environ is None else environ
    trace_wanted()  # a wrong value is the user's error, not that of the first plugin whose hook is called
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    load, disable = _names(environ, LOAD_VARIABLE), _names(environ, DISABLE_VARIABLE)
    for variable, names in ((LOAD_VARIABLE, load), (DISABLE_VARIABLE, disable)):
        _refuse_unknown(variable, names, (point.name for point in points))
    found = [_from_entry_point(point, _reason_to_skip(point.name, load, disable)) for point in points]
    found += [_from_file(Path(path)) for path in files]
    return mark_duplicates(found)


def _names(environ: Mapping[str, str], variable: str) -> frozenset[str] | None:
    if variable not in environ:
        return None
    return frozenset(name.strip() for name in environ[variable].split(",") if name.strip())


def _refuse_unknown(variable: str, names: frozenset[str] | None, installed: Iterable[str]) -> None:
    known = sorted(set(installed))
    unknown = sorted((names or frozenset()) - set(known))
    if unknown:
        raise LoraError(
            f"{variable}: {', '.join(unknown)}",
            reason=f"no such plugin is installed; installed: {', '.join(known) or 'none'}",
            cure="correct or unset the variable, or install the plugin",
        )


def _reason_to_skip(name: str, load: frozenset[str] | None, disable: frozenset[str] | None) -> str | None:
    if load is not None and name not in load:
        return f"not in {LOAD_VARIABLE}"
    if disable is not None and name in disable:
        return f"in {DISABLE_VARIABLE}"
    return None


def _from_entry_point(point: EntryPoint, skip: str | None) -> DiscoveredPlugin:
    row = DiscoveredPlugin(
        name=point.name,
        distribution=point.dist.name if point.dist else None,
        version=point.dist.version if point.dist else None,
        source=point.value,
        file=_file_of(point.module),
        status=PluginStatus.OK,
    )
    if skip is not None:
        return replace(row, status=PluginStatus.DISABLED, error=skip)
    return _guarded(row, point.load)


def _file_of(module: str) -> str | None:
    """File of the module's top-level package, found without importing it."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    return spec.origin if spec is not None else None


def _from_file(path: Path) -> DiscoveredPlugin:
    if not path.is_file():
        raise LoraError(f"plugin file {path}", reason="there is no such file", cure="give the path of a Python file")
    row = DiscoveredPlugin(
        name=path.stem,
        distribution=None,
        version=None,
        source=str(path),
        file=str(path.resolve()),
        status=PluginStatus.OK,
    )
    return _guarded(row, lambda: _import_file(path))


def _import_file(path: Path) -> ModuleType:
    # The name carries the path's hash: two files of one name are two modules, none shadows an installed one.
    name = f"_lora_plugin_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    return import_file(name, path)


def _guarded(row: DiscoveredPlugin, load: Callable[[], Any]) -> DiscoveredPlugin:
    try:
        plugin = load()
        row = replace(row, requires_api=check_api(plugin))
        return replace(row, architectures=architectures_of(plugin, row.name), plugin=plugin)
    # Foreign code may fail in any way while it is imported, SystemExit included; each way is a row.
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, LoraError) else f"{type(error).__name__}: {error}"
        return replace(row, status=PluginStatus.BROKEN, error=reason, traceback=traceback.format_exc())
