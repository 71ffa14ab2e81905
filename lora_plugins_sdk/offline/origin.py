"""Whether an adapter was made for what it is to be used for, as far as its meta file tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_plugins_sdk.adapter_meta import META_FILE, engine_problems
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
    origin = adapter.saved.origin
    yield from engine_problems(str(adapter.directory), origin)
    if origin is None or origin.base_fingerprint in (None, base_fingerprint(base)):
        return
    yield Diagnostic(
        subject=str(adapter.directory),
        reason=f"was trained on another base than {base} (config.json or weights differ)",
        cure=f"give the base it was trained on ({adapter.config.get('base_model_name_or_path') or 'unnamed'}); if this "
        f"base is meant, remove {META_FILE} from the adapter",
    )
