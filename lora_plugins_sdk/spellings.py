"""One HF config in several spellings: a published one and transformers' own name some keys differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk.errors import Diagnostic, raise_if_any

Spellings = Mapping[str, Mapping[str, str]]
"""Key that only one spelling has -> what is then read: declared key -> that spelling's key for it."""


def in_declared_keys(config: Mapping[str, Any], spellings: Spellings) -> dict[str, Any]:
    """A config with a value for each declared key that another spelling has under a key of its own.

    Args:
        config: a HF config, of one spelling or with both.
        spellings: by the key that tells a spelling; null tells nothing. A key that the spelling reads for something
            else than its declared meaning (`intermediate_size` of another MLP) is replaced, not compared.

    Raises:
        LoraError: both spellings give a value, and not the same one; everything is listed.
    """
    found = dict(config)
    problems = []
    for mark, keys in spellings.items():
        if config.get(mark) is None:
            continue
        for key, own in keys.items():
            value, declared = config.get(own), config.get(key)
            if value is None:
                continue
            if declared not in (None, value) and key not in keys.values():
                problems.append(
                    Diagnostic(
                        subject=f"config keys {key!r} and {own!r}",
                        reason=f"name the same and say {declared!r} and {value!r}",
                        cure="use the config.json that belongs to the checkpoint",
                    )
                )
            found[key] = value
    raise_if_any("this config contradicts itself:", problems)
    return found
