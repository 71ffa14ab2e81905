"""Packages that a command needs beyond the core ones."""

from __future__ import annotations

from importlib.util import find_spec

from lora_plugins_sdk.errors import LoraError

_TENSORS = ("torch", "safetensors", "numpy")


def require_tensors(command: str) -> None:
    """Refuse to start a command that reads tensors where that is not possible.

    Raises:
        LoraError: a package is not installed.
    """
    missing = [name for name in _TENSORS if find_spec(name) is None]
    if missing:
        raise LoraError(
            f"lora-plugins {command}",
            reason=f"needs {', '.join(missing)}, not installed",
            cure="install lora-plugins-sdk[megatron]",
        )
