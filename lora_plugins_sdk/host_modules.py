"""Finding a plan's linears in a host model, whatever wraps it and however pipeline stages number their layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from torch import nn

from lora_plugins_sdk.errors import LoraError


@lru_cache
def _pattern(path: str) -> re.Pattern[str]:
    # Any prefix is allowed: wrappers (`module.`) and multimodal models (`language_model.`) put one there.
    body = re.escape(path).replace(re.escape("{layer}"), r"(\d+)")
    return re.compile(rf"(?:(?P<prefix>.+)\.)?{body}")


def locate(chunks: Iterable[nn.Module], paths: Iterable[str]) -> Mapping[str, tuple[nn.Module, str]]:
    """Find modules by host path, resolving local layer indices to model-wide layer numbers.

    Args:
        chunks: this rank's model chunks.
        paths: host module paths with `{layer}` for the layer number.

    Returns:
        Model-wide path -> (module that owns it, local name within its chunk).

    Raises:
        LoraError: two modules answer to one path.
    """
    patterns = [(path, _pattern(path)) for path in dict.fromkeys(paths)]
    found: dict[str, tuple[nn.Module, str]] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for path, pattern in patterns:
                match = pattern.fullmatch(name)
                if match is None:
                    continue
                wide = path.format(layer=_global_layer(chunk, name, path, match)) if "{layer}" in path else path
                if wide in found:
                    raise LoraError(
                        wide,
                        reason=f"both {found[wide][1]!r} and {name!r} answer to this path",
                        cure="attach to the language model alone (pass that submodule)",
                    )
                found[wide] = (module, name)
    return found


def _global_layer(chunk: nn.Module, name: str, path: str, match: re.Match[str]) -> int:
    """Model-wide number of the layer in `name`: megatron-core's layers know theirs (`layer_number`, from 1)."""
    local = int(match.group(2))
    stack = path[: path.index(".{layer}")]
    prefix = f"{match.group('prefix')}." if match.group("prefix") else ""
    layer = chunk.get_submodule(f"{prefix}{stack}.{local}")
    number = getattr(layer, "layer_number", None)
    return local if number is None else int(number) - 1
