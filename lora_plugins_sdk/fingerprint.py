"""Which base model a HF directory holds, told from a few bytes of every tensor. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.safetensors_header import StoredTensor
from lora_plugins_sdk.weight_files import read_weight_files

# Keys of config.json that say who wrote it.
_WRITER = ("_name_or_path", "transformers_version")
_SAMPLE = 4096


def base_fingerprint(directory: str | Path) -> str:
    """SHA-256 over `config.json` and, for each tensor, name, dtype, shape and 4 KiB from its start, middle and end.

    Fine-tunes of one model differ, as training moves every weight; the same weights in other shards are the same. Cost:
    the headers and 12 KiB a tensor.

    Args:
        directory: a local HF directory with safetensors.

    Raises:
        LoraError: it cannot be read.
    """
    config = {key: value for key, value in read_hf_config(directory).items() if key not in _WRITER}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    files = read_weight_files(directory)
    found: dict[str, bytes] = {}
    for name, header in files.headers.items():
        try:
            with (files.directory / name).open("rb") as file:
                found |= {tensor: _samples(file, stored) for tensor, stored in header.tensors.items()}
        except OSError as error:
            raise LoraError(
                str(files.directory / name), reason=f"cannot be read ({error.strerror})", cure="give a readable file"
            ) from error
    for tensor in sorted(found):
        stored = files.tensor(tensor)
        digest.update(json.dumps([tensor, stored.dtype, stored.shape]).encode() + found[tensor])
    return digest.hexdigest()


def _samples(file: BinaryIO, stored: StoredTensor) -> bytes:
    last = max(stored.start, stored.stop - _SAMPLE)
    samples = hashlib.sha256()
    for start in (stored.start, (stored.start + last) // 2, last):
        file.seek(start)
        samples.update(file.read(min(_SAMPLE, stored.stop - start)))
    return samples.digest()
