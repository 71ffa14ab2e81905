"""The tensors of a local HF safetensors directory, by name and slice."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lora_plugins_sdk.errors import LoraError


class HfTensors:
    """The tensors of a local HF directory, read slice by slice.

    Args:
        directory: holds `*.safetensors`, with or without `model.safetensors.index.json`.

    Raises:
        LoraError: no directory, no safetensors, or an index that names a file outside or absent.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in self._shards():
            for name in self._file(file).keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                if name in self._where:
                    raise LoraError(
                        name,
                        reason=f"is in both {self._where[name]} and {file} of {self.directory}",
                        cure="keep one of them, or add the model.safetensors.index.json of this checkpoint",
                    )
                self._where[name] = file

    def _shards(self) -> list[str]:
        index = self.directory / "model.safetensors.index.json"
        if not index.is_file():
            files = sorted(path.name for path in self.directory.glob("*.safetensors"))
            if not files:
                raise LoraError(
                    str(self.directory),
                    reason="holds no *.safetensors file",
                    cure="give a local HF directory with safetensors weights",
                )
            return files
        try:
            files = sorted({str(file) for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LoraError(
                str(index), reason=f"is no weight index ({error!r})", cure="download the checkpoint again"
            ) from error
        for file in files:
            if Path(file).name != file or not (self.directory / file).is_file():
                raise LoraError(
                    str(index),
                    reason=f"names {file!r}, which is not in the directory",
                    cure="download the checkpoint again",
                )
        return files

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self.directory / name
            try:
                self._files[name] = self._open.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise LoraError(
                    str(path),
                    reason=f"is not a safetensors file ({error})",
                    cure="download the checkpoint again",
                ) from error
        return self._files[name]

    def names(self) -> set[str]:
        """Every tensor name."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._file(self._where[name]).get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of a tensor."""
        return self._file(self._where[name]).get_slice(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Columns `[start, stop)` of a matrix."""
        return self._file(self._where[name]).get_slice(name)[:, start:stop]

    def close(self) -> None:
        """Close the files."""
        self._open.close()
