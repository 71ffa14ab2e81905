"""The adapter that training starts from: whether it was made for this base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_plugins_sdk import base_fingerprint
from lora_plugins_sdk.adapter_files import CONFIG_FILE
from lora_plugins_sdk.adapter_meta import META_FILE, read_meta
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.json_files import read_json_object


def other_base(adapter: Path, model: Path) -> Iterator[Diagnostic]:
    """Why an adapter does not belong to a base model, as far as its files can tell: by the fingerprint in its meta
    file; without one, when the base that its config names is a directory here, by that directory's.

    Args:
        adapter: PEFT directory.
        model: HF directory of the base.

    Raises:
        LoraError: a directory cannot be read.
    """
    meta = read_meta(adapter)
    config = read_json_object(adapter / CONFIG_FILE, cure="give a PEFT adapter directory")
    name = config.get("base_model_name_or_path")
    fingerprint = None if meta is None else meta.origin.base_fingerprint
    remembered = fingerprint is not None
    if fingerprint is None and isinstance(name, str) and (Path(name) / "config.json").is_file():
        fingerprint = base_fingerprint(name)
    if fingerprint is not None and fingerprint != base_fingerprint(model):
        yield Diagnostic(
            subject=f"warm_start.adapter = {str(adapter)!r}",
            reason=f"was trained on the base in {name!r}, and model.path = {str(model)!r} holds another one",
            cure="set model.path to that base, or give an adapter of this one"
            + (f"; if this base is meant, remove {META_FILE} from the adapter" if remembered else ""),
        )
