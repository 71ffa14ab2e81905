"""A PEFT adapter as a directory: `adapter_config.json`, the tensors in one file or several, `adapter_meta.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lora_plugins_sdk.adapter_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SHARD_FILE,
    WEIGHTS_FILE,
    adapter_weights,
    refuse_foreign_files,
)
from lora_plugins_sdk.adapter_meta import (
    META_FILE,
    AdapterOrigin,
    contradictions,
    describe_adapter,
    read_meta,
    stored_file,
)
from lora_plugins_sdk.errors import LoraError, raise_if_any
from lora_plugins_sdk.json_files import read_json_object
from lora_plugins_sdk.staging import staged_directory, writable

_AGAIN = "export the adapter again"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """An adapter in PEFT's terms.

    Args:
        tensors: PEFT tensor name -> full factor.
        config: content of `adapter_config.json`.
        origin: where it comes from; None when nobody said.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    origin: AdapterOrigin | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def write_adapter(
    adapter: PeftAdapter, directory: str | Path, *, max_shard_bytes: int | None = None, replace: bool = False
) -> Path:
    """Write an adapter directory, which appears whole or not at all. One rank of a run calls this.

    The same adapter gives the same bytes, whatever topology it was exported from.

    Args:
        adapter: what to write.
        directory: the directory to make, or an empty one; its parents are made too.
        max_shard_bytes: the tensors go into several files with an index when they are larger together; None for one
            file, which is all that PEFT itself reads. A tensor larger than this has a file of its own.
        replace: whether an adapter may be there already; it stays until the new one is whole.

    Raises:
        LoraError: the directory holds something, or cannot be written; nothing is left of it.
    """
    directory = Path(directory)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in sorted(adapter.tensors.items())}
    with writable(directory):
        directory.absolute().parent.mkdir(parents=True, exist_ok=True)
        empty = directory.is_dir() and not any(directory.iterdir())
        if replace and directory.is_dir():
            refuse_foreign_files(directory)
    with staged_directory(directory, replace=replace or empty) as place:
        shards = _shards(tensors, max_shard_bytes)
        for file, names in shards.items():
            try:
                save_file({name: tensors[name] for name in names}, place / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise LoraError(
                    str(directory),
                    reason=f"cannot be written ({error})",
                    cure="give a writable place with free space",
                ) from error
        if len(shards) > 1:
            placed = {name: file for file, names in shards.items() for name in names}
            _write_json(place / INDEX_FILE, {"metadata": {"total_size": adapter.num_bytes}, "weight_map": placed})
        _write_json(place / CONFIG_FILE, dict(adapter.config))
        meta = describe_adapter(adapter.config, adapter.origin, {file: stored_file(place / file) for file in shards})
        (place / META_FILE).write_text(meta.to_json(), encoding="utf-8")
    return directory


def read_adapter(directory: str | Path) -> PeftAdapter:
    """Read an adapter directory; safetensors only, no pickle.

    Raises:
        LoraError: a file is missing or not what its name says, or it contradicts the meta file.
    """
    directory = Path(directory)
    if not os.path.exists(directory / CONFIG_FILE):
        raise LoraError(
            str(directory), reason=f"has no {CONFIG_FILE}", cure="give a PEFT adapter directory saved with safetensors"
        )
    config = read_json_object(directory / CONFIG_FILE, cure=_AGAIN)
    weights = adapter_weights(directory)
    meta = read_meta(directory)
    if meta is not None:
        files = {name: directory / name for name in weights.headers}
        raise_if_any(f"{directory} is not as it was exported:", contradictions(meta, config, files))
    tensors: dict[str, torch.Tensor] = {}
    for name in weights.headers:
        try:
            tensors |= load_file(directory / name)
        except (SafetensorError, OSError) as error:
            raise LoraError(str(directory / name), reason=f"cannot be loaded ({error})", cure=_AGAIN) from error
    return PeftAdapter(tensors=tensors, config=config, origin=None if meta is None else meta.origin)


def _shards(tensors: Mapping[str, torch.Tensor], max_bytes: int | None) -> dict[str, list[str]]:
    """File name -> names of its tensors."""
    parts = list(_parts(tensors, max_bytes))
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}
    return {SHARD_FILE.format(number=number, count=len(parts)): part for number, part in enumerate(parts, start=1)}


def _parts(tensors: Mapping[str, torch.Tensor], max_bytes: int | None) -> Iterator[list[str]]:
    """Names in order, as many together as fit."""
    part: list[str] = []
    held = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if max_bytes is not None and part and held + size > max_bytes:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    yield part


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
