"""JSON files that a user hands in: one object, no key twice, read only after a look at its size."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from lora_plugins_sdk.errors import LoraError

# The weight index of the largest public checkpoints is near 10 MB.
MAX_BYTES = 100 * 1024**2


class _Twice(ValueError):
    """A key that an object holds twice."""


def read_json_object(path: str | Path, *, cure: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: a regular file.
        cure: what the user can do when it is not good.

    Raises:
        LoraError: no regular file, too large, not JSON, not an object, or an object with one key twice.
    """
    path = Path(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise LoraError(str(path), reason="is not a file", cure=cure)
        if found.st_size > MAX_BYTES:
            raise LoraError(str(path), reason=f"has {found.st_size} bytes, more than {MAX_BYTES}", cure=cure)
        content = path.read_bytes()
    except OSError as error:
        raise LoraError(str(path), reason=f"cannot be read ({error.strerror})", cure=cure) from error
    try:
        return parse_json_object(content)
    except ValueError as error:
        raise LoraError(str(path), reason=str(error), cure=cure) from error


def parse_json_object(content: bytes) -> dict[str, Any]:
    """The object that JSON text holds.

    Raises:
        ValueError: with the reason.
    """
    try:
        parsed = json.loads(content, object_pairs_hook=_unique)
    except _Twice:
        raise
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError("holds no JSON object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Twice(f"holds the key {twice[:100]!r} twice")
    return keys
