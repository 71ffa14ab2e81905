"""What has to be installed before a level can be run."""

from __future__ import annotations

from importlib.util import find_spec

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing.conformance.check import Level

_NEEDED = {
    Level.STATIC: ("hypothesis",),
    Level.SINGLE: ("torch", "megatron.core", "safetensors", "transformers", "peft"),
}


def require_parts(highest: Level) -> None:
    """Refuse to start what could not be finished.

    Raises:
        LoraError: a package is not installed.
    """
    needed = [name for level, names in _NEEDED.items() if level <= highest for name in names]
    missing = [name for name in needed if not _installed(name)]
    if missing:
        raise LoraError(
            f"conformance level {int(highest)}",
            reason=f"needs {', '.join(missing)}, not installed",
            cure="install lora-plugins-sdk[kit], or ask for a lower level",
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
