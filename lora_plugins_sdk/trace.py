"""`LORA_PLUGINS_TRACE=1`: every hook call on standard error, with arguments and result."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from lora_plugins_sdk.errors import LoraError

TRACE_VARIABLE = "LORA_PLUGINS_TRACE"

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 160


def trace_wanted() -> bool:
    """Whether the variable asks for a trace.

    Raises:
        LoraError: the variable is something else than `0`, `1` or empty.
    """
    value = os.environ.get(TRACE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise LoraError(f"{TRACE_VARIABLE}={value}", reason="is neither 0 nor 1", cure="set it to 1, or unset it")
    return value == "1"


def trace_if_asked(manager: pluggy.PluginManager) -> None:
    """Trace the manager's hook calls when the variable asks for it."""
    if trace_wanted():
        manager.add_hookcall_monitoring(_before, _after)


def _before(hook: str, implementations: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    shown = ", ".join(f"{name}={_describe(value)}" for name, value in arguments.items())
    asked = ", ".join(one.plugin_name for one in reversed(implementations)) or "nobody"
    _write(f"{hook}({shown}) asks {asked}")


def _after(
    outcome: pluggy.Result[Any], hook: str, implementations: Sequence[Any], arguments: Mapping[str, Any]
) -> None:
    if outcome.exception is not None:
        _write(f"{hook} raised {type(outcome.exception).__name__}: {outcome.exception}")
    else:
        _write(f"{hook} -> {_describe(outcome.get_result())}")


def _describe(value: Any) -> str:
    """A short text. A tensor shows type and shape only: reading its values may wait for a GPU."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__}{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_describe(one)}" for key, one in list(value.items())[:6]) + "}"
    return _short.repr(value)


def _write(text: str) -> None:
    rank = f" rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    print(f"lora-plugins trace{rank}: {text}", file=sys.stderr, flush=True)
