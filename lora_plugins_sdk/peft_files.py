"""A PEFT adapter as two files: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.json_files import read_json_object
from lora_plugins_sdk.safetensors_header import read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_AGAIN = "export the adapter again"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """An adapter in PEFT's terms.

    Args:
        tensors: PEFT tensor name -> full factor.
        config: content of `adapter_config.json`.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def write_adapter(adapter: PeftAdapter, directory: str | Path) -> Path:
    """Write an adapter directory; each file appears whole or not at all. One rank of a run calls this.

    Raises:
        LoraError: the directory cannot be written.
    """
    directory = Path(directory)
    config = directory / CONFIG_FILE
    weights = directory / WEIGHTS_FILE
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in adapter.tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in (config, weights):
            part = path.with_name(f".{path.name}.part")
            if path == config:
                part.write_text(json.dumps(dict(adapter.config), indent=2, sort_keys=True) + "\n")
            else:
                save_file(tensors, part, metadata={"format": "pt"})
            os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise LoraError(
            str(directory),
            reason=f"cannot be written ({getattr(error, 'strerror', None) or error})",
            cure="give a writable directory with free space",
        ) from error
    return directory


def read_adapter(directory: str | Path) -> PeftAdapter:
    """Read an adapter directory; safetensors only, no pickle.

    Raises:
        LoraError: a file is missing or not what its name says.
    """
    directory = Path(directory)
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    for path in (config, weights):
        if not os.path.isfile(path):
            raise LoraError(
                str(directory),
                reason=f"has no {path.name}",
                cure="give a PEFT adapter directory saved with safetensors",
            )
    parsed = read_json_object(config, cure=_AGAIN)
    read_header(weights)
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise LoraError(str(weights), reason=f"cannot be loaded ({error})", cure=_AGAIN) from error
    return PeftAdapter(tensors=tensors, config=parsed)
