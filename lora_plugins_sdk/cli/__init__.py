"""The command `lora-plugins`. Needs no torch."""

from lora_plugins_sdk.cli.app import main

__all__ = ["main"]
