"""Whether an adapter was made for what it is to be used for, as far as its meta file tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_plugins_sdk.adapter_meta import META_FILE
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.fingerprint import base_fingerprint
from lora_plugins_sdk.offline.adapter import PlainAdapter


def origin_problems(adapter: PlainAdapter, base: Path) -> Iterator[Diagnostic]:
    """Why an adapter does not belong to a base; nothing when its meta file is silent, or is not there.

    Args:
        adapter: the checked adapter.
        base: HF directory.

    Raises:
        LoraError: the base cannot be read.
    """
    yield from _serving_form(adapter)
    origin = adapter.saved.origin
    if origin is None or origin.base_fingerprint in (None, base_fingerprint(base)):
        return
    yield Diagnostic(
        subject=str(adapter.directory),
        reason=f"was trained on another base than {base} (config.json or weights differ)",
        cure=f"give the base it was trained on ({adapter.config.get('base_model_name_or_path') or 'unnamed'}); if this "
        f"base is meant, remove {META_FILE} from the adapter",
    )


def _serving_form(adapter: PlainAdapter) -> Iterator[Diagnostic]:
    """An adapter in an engine's terms is for that engine alone."""
    origin = adapter.saved.origin
    if origin is not None and origin.engine is not None:
        yield Diagnostic(
            subject=str(adapter.directory),
            reason=f"is an export for {origin.engine}, under names and targets of that engine's own",
            cure="give the PEFT directory that it was exported from, or one made of it with `lora-plugins export`",
        )
