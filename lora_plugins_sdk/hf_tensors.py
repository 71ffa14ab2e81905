"""The tensors of a local HF safetensors directory, by name and slice."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.weight_files import read_weight_files


class HfTensors:
    """The tensors of a local HF directory, read slice by slice.

    Args:
        directory: holds `*.safetensors`, with or without `model.safetensors.index.json`.

    Raises:
        LoraError: what `read_weight_files` refuses.
    """

    def __init__(self, directory: str | Path) -> None:
        self._files = read_weight_files(directory)
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}

    def names(self) -> set[str]:
        """Every tensor name."""
        return set(self._files.where)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files.where

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._files.tensor(name).shape

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of a tensor."""
        return self._slice(name, slice(start, stop))

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Columns `[start, stop)` of a matrix."""
        return self._slice(name, (slice(None), slice(start, stop)))

    def part(self, name: str, *index: int | slice) -> torch.Tensor:
        """What an index over the leading dimensions selects of a tensor."""
        return self._slice(name, index)

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def _slice(self, name: str, part: slice | tuple[int | slice, ...]) -> torch.Tensor:
        file = self._files.where[name]
        path = self._files.directory / file
        try:
            if file not in self._handles:
                self._handles[file] = self._open.enter_context(safe_open(path, framework="pt"))
            return self._handles[file].get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise LoraError(
                str(path), reason=f"cannot be read as safetensors ({error})", cure="download the checkpoint again"
            ) from error
