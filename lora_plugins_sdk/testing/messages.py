"""What a parent and its ranks say to each other. Free of torch, so that the parent need not import it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_plugins_sdk.testing.function import FunctionReference
from lora_plugins_sdk.testing.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """To a rank: what it needs to run its part of a case. `arguments` is the pickle of (args, kwargs)."""

    function: FunctionReference
    arguments: bytes
    layout: Layout
    rank: int
    store: Path
    timeout: float
    environment: dict[str, str]
    folder: str
    import_path: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """To a rank: every rank is done, close the groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """From a rank: it has no process group and waits for a case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """From a rank: the function returned; `value` is a pickle with every tensor on the CPU."""

    value: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """From a rank: the function, or the set-up before it, raised."""

    summary: str
    traceback: str
