"""The files of an adapter directory: config, tensors in one file or several, meta file. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from lora_plugins_sdk.adapter_meta import META_FILE, stored_file
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.staging import directory_problem
from lora_plugins_sdk.weight_files import WeightFiles, headers_of, placed_files, refuse_misplaced

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
SHARD_FILE = "adapter_model-{number:05d}-of-{count:05d}.safetensors"
# Where a checkpoint, and a run, have their adapter.
_WITHIN = "adapter"
_SHARD = re.compile(r"adapter_model-\d+-of-\d+\.safetensors")
_AGAIN = "export the adapter again"


def adapter_directory(path: str | Path) -> Path:
    """The adapter that a path means: a PEFT directory, or the one inside a checkpoint or a finished run.

    Raises:
        LoraError: there is no adapter.
    """
    path = Path(path)
    for one in (path, path / _WITHIN):
        if os.path.isfile(one / CONFIG_FILE):
            return one
    raise LoraError(
        str(path),
        reason=directory_problem(path) or f"has no {CONFIG_FILE}",
        cure="give a PEFT directory saved with safetensors, a checkpoint (RUN/checkpoints/step-N) or a finished run",
    )


def adapter_weights(directory: str | Path) -> WeightFiles:
    """The tensor files of an adapter directory, known by their headers.

    Raises:
        LoraError: there are none, or two sets; an index that is damaged, names a file outside or absent, or disagrees
            with the files; a shard that the index does not name.
    """
    directory = Path(directory)
    try:
        present = os.listdir(directory)
    except OSError as error:
        raise LoraError(
            str(directory), reason=f"cannot be read ({error.strerror})", cure="give a PEFT adapter directory"
        ) from error
    index, indexed = directory / INDEX_FILE, INDEX_FILE in present
    if not indexed and not os.path.isfile(directory / WEIGHTS_FILE):
        raise LoraError(
            str(directory),
            reason=f"has no {WEIGHTS_FILE}",
            cure="give a PEFT adapter directory saved with safetensors",
        )
    placed = placed_files(index, again=_AGAIN) if indexed else {}
    files = sorted(set(placed.values())) if indexed else [WEIGHTS_FILE]
    strays = sorted(name for name in present if name not in files and (name == WEIGHTS_FILE or _SHARD.fullmatch(name)))
    raise_if_any(
        f"{directory} holds more than one adapter's tensors:",
        (
            Diagnostic(
                subject=name,
                reason=f"is not named by {INDEX_FILE}" if indexed else f"is beside {WEIGHTS_FILE}, without an index",
                cure="move it elsewhere, or export the adapter again into a new directory",
            )
            for name in strays
        ),
    )
    headers, where = headers_of(directory, files, again=_AGAIN)
    refuse_misplaced(index, placed, where, again=_AGAIN)
    return WeightFiles(directory=directory, indexed=indexed, headers=headers, where=where)


def adapter_digest(directory: str | Path) -> str:
    """SHA-256 that tells one adapter's tensor files from another's.

    Raises:
        LoraError: a file is missing or cannot be read.
    """
    weights = adapter_weights(directory)
    digest = hashlib.sha256()
    for name in sorted(weights.headers):
        digest.update(f"{name} {stored_file(weights.directory / name).sha256}\n".encode())
    return digest.hexdigest()


def refuse_foreign_files(directory: Path) -> None:
    """Whether an adapter directory may be replaced: it holds an adapter's files and nothing else.

    Raises:
        LoraError: naming a file that is no adapter's.
    """
    for path in sorted(directory.iterdir()):
        if path.name not in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, META_FILE) and not _SHARD.fullmatch(path.name):
            raise LoraError(
                str(directory),
                reason=f"holds {path.name}, which is no adapter's, and would be replaced whole",
                cure="give a new directory",
            )
