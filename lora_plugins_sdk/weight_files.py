"""The safetensors files of a local HF directory: which there are and which tensor is where. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.json_files import read_json_object
from lora_plugins_sdk.safetensors_header import SafetensorsHeader, StoredTensor, read_header

INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "download the checkpoint again"
_LOCAL = "give a local HF directory with safetensors weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """The weights of one directory, known by their headers.

    Args:
        directory: the directory.
        indexed: whether `model.safetensors.index.json` says which files count; all `*.safetensors` do otherwise.
        headers: file name -> header.
        where: tensor name -> file name.
    """

    directory: Path
    indexed: bool
    headers: Mapping[str, SafetensorsHeader]
    where: Mapping[str, str]

    def tensor(self, name: str) -> StoredTensor:
        """What the header says of a tensor."""
        return self.headers[self.where[name]].tensors[name]


def read_weight_files(directory: str | Path) -> WeightFiles:
    """Read the index and every header.

    Raises:
        LoraError: no directory or no safetensors in it; an index that is damaged, names a file outside or absent, or
            disagrees with the files; a tensor that is in two files.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    present = _listing(directory)
    indexed = INDEX_FILE in present
    placed = placed_files(index, again=_AGAIN) if indexed else {}
    files = sorted(set(placed.values()) if indexed else (name for name in present if name.endswith(".safetensors")))
    if not files:
        raise LoraError(str(directory), reason="holds no *.safetensors file", cure=_LOCAL)
    headers, where = headers_of(directory, files, again=f"keep one of them; an {INDEX_FILE} says which files count")
    refuse_misplaced(index, placed, where, again=_AGAIN)
    return WeightFiles(directory=directory, indexed=indexed, headers=headers, where=where)


def headers_of(
    directory: Path, files: Iterable[str], *, again: str
) -> tuple[dict[str, SafetensorsHeader], dict[str, str]]:
    """File name -> header, and tensor name -> file name.

    Args:
        directory: where the files are.
        files: their names.
        again: what the user can do when a tensor is in two of them.

    Raises:
        LoraError: a file is damaged, or a tensor is in two files.
    """
    headers = {file: read_header(directory / file) for file in files}
    where: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in where:
                raise LoraError(name, reason=f"is in both {where[name]} and {file} of {directory}", cure=again)
            where[name] = file
    return headers, where


def placed_files(index: Path, *, again: str) -> dict[str, str]:
    """What a weight index says: tensor name -> file name, each a plain name of a file that is there.

    Args:
        index: the index file.
        again: what the user can do when it is not good.

    Raises:
        LoraError: it is damaged, or names a file outside or absent.
    """
    placed = read_json_object(index, cure=again).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise LoraError(str(index), reason="is no weight index: it holds no weight_map of file names", cure=again)
    for file in sorted(set(placed.values())):
        # A name of several parts or `..` would lead out of the directory. os.path takes names that no file can have.
        if Path(file).name != file or not os.path.isfile(index.parent / file):
            raise LoraError(str(index), reason=f"names {file[:200]!r}, which is not in the directory", cure=again)
    return placed


def refuse_misplaced(index: Path, placed: Mapping[str, str], where: Mapping[str, str], *, again: str) -> None:
    """Whether each tensor is where the index says.

    Raises:
        LoraError: listing those that are not.
    """
    raise_if_any(f"{index} does not fit its files:", _misplaced(placed, where, again))


def _listing(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise LoraError(str(directory), reason=f"cannot be read ({error.strerror})", cure=_LOCAL) from error


def _misplaced(placed: Mapping[str, str], where: Mapping[str, str], again: str) -> Iterator[Diagnostic]:
    for name, file in placed.items():
        if where.get(name) != file:
            yield Diagnostic(
                subject=name,
                reason=f"the index places it in {file}, "
                + (f"it is in {where[name]}" if name in where else "it is in none of the files"),
                cure=again,
            )
