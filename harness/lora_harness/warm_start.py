"""The adapter that training starts from: whether it was made for this base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_plugins_sdk import base_fingerprint
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.json_files import read_json_object
from lora_plugins_sdk.peft_files import CONFIG_FILE


def other_base(adapter: Path, model: Path) -> Iterator[Diagnostic]:
    """Why an adapter does not belong to a base model, as far as its files can tell: when the base that they name is a
    directory here, its fingerprint is compared.

    Args:
        adapter: PEFT directory.
        model: HF directory of the base.

    Raises:
        LoraError: a directory cannot be read.
    """
    config = read_json_object(adapter / CONFIG_FILE, cure="give a PEFT adapter directory")
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not (Path(name) / "config.json").is_file():
        return
    if base_fingerprint(name) != base_fingerprint(model):
        yield Diagnostic(
            subject=f"warm_start.adapter = {str(adapter)!r}",
            reason=f"was trained on the base in {name!r}, and model.path = {str(model)!r} holds another one",
            cure="set model.path to that base, or give an adapter of this one",
        )
