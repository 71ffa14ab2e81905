"""Everything in a base directory that is not its weights: what a merged copy takes along and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.weight_files import INDEX_FILE, WeightFiles

# Formats that hold the weights a second time, without the adapter.
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".gguf", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")
_WEIGHT_PREFIX = "pytorch_model"
_UNMERGED = "weights in another format, without the adapter"
_HIDDEN = "hidden directory"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherFiles:
    """Files beside the weights and their index, relative to the directory.

    Args:
        taken: copied as they are.
        left: path -> why it is not copied.
    """

    taken: tuple[Path, ...]
    left: Mapping[str, str]


def other_files(base: WeightFiles) -> OtherFiles:
    """List what is beside the weights.

    Raises:
        LoraError: a symbolic link that leads out of the directory (a Hugging Face cache's own links do not count), or
            something that is no file; all are listed.
    """
    taken: list[Path] = []
    left: dict[str, str] = {}
    problems: list[Diagnostic] = []
    for path in _walk(base.directory, left):
        relative = path.relative_to(base.directory)
        if not os.path.isfile(path) or not _stays_inside(path, base.directory):
            problems.append(
                Diagnostic(
                    subject=str(path),
                    reason="is a symbolic link that leads out of the directory or nowhere"
                    if path.is_symlink()
                    else "is neither a file nor a directory",
                    cure="put the file itself there, or take the entry away",
                )
            )
        elif str(relative) in base.headers or (base.indexed and str(relative) == INDEX_FILE):
            continue
        elif path.name.endswith(_WEIGHT_SUFFIXES) or path.name.startswith(_WEIGHT_PREFIX):
            left[str(relative)] = _UNMERGED
        else:
            taken.append(relative)
    raise_if_any(f"{base.directory} cannot be copied:", problems)
    return OtherFiles(taken=tuple(taken), left=left)


def _walk(directory: Path, left: dict[str, str]) -> Iterator[Path]:
    """Everything that is no directory. Links are not followed; hidden directories below the top are left."""
    for folder, folders, files in os.walk(directory):
        for name in sorted(folders):
            path = Path(folder, name)
            if path.is_symlink():
                yield path
            elif name.startswith("."):
                left[str(path.relative_to(directory))] = _HIDDEN
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not Path(folder, name).is_symlink()
        )
        yield from (Path(folder, name) for name in sorted(files))


def _stays_inside(path: Path, directory: Path) -> bool:
    """Whether a file's content lies in the directory, or in the blobs of the Hugging Face cache it is a snapshot of."""
    if not path.is_symlink():
        return True
    home, target = directory.resolve(), path.resolve()
    in_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return target.is_relative_to(home) or in_cache
