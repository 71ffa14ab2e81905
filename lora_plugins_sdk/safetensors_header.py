"""The header of a safetensors file: where each tensor lies. Reads no tensor and needs no torch.

Format: 8 bytes with the header's length (little endian), the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.json_files import parse_json_object

# Bits of one element.
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
METADATA = "__metadata__"
# The safetensors library refuses larger headers too.
MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_NAME = 500
_CURE = "download or export it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        dtype: in safetensors' terms, for example `BF16`.
        shape: its shape.
        start: first byte in the file.
        stop: byte after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsHeader:
    """A file's header.

    Args:
        path: the file.
        tensors: name -> tensor, in the order of their bytes.
        metadata: free text of the writer.
        data_start: first byte after the header.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data_start: int


def read_header(path: str | Path) -> SafetensorsHeader:
    """Read and check a header; what it promises is compared with the file's size before anything is allocated.

    Raises:
        LoraError: no regular file, or not a whole and consistent safetensors file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise LoraError(str(path), reason="is not a file", cure=_CURE)
            prefix = file.read(_LENGTH.size)
            length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else None
            if length is None or length > min(found.st_size - _LENGTH.size, MAX_HEADER_BYTES):
                raise _damaged(path, "the header is longer than the file or than the format allows")
            content = file.read(length)
    except OSError as error:
        raise LoraError(str(path), reason=f"cannot be read ({error.strerror})", cure=_CURE) from error
    try:
        header = parse_json_object(content)
        metadata = _metadata(header.pop(METADATA, {}))
        start = _LENGTH.size + length
        tensors = dict(sorted(_tensors(header, start), key=lambda item: (item[1].start, item[1].stop)))
        _check_tiling(tensors, start, found.st_size)
    except ValueError as error:
        raise _damaged(path, f"the header {error}") from error
    return SafetensorsHeader(path=path, tensors=tensors, metadata=metadata, data_start=start)


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The start of a safetensors file, up to its first tensor.

    Args:
        tensors: name -> (dtype, shape), in the order in which their bytes follow.
        metadata: free text.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return _LENGTH.pack(len(content)) + content


def _damaged(path: Path, reason: str) -> LoraError:
    return LoraError(str(path), reason=f"is not a safetensors file: {reason}", cure=_CURE)


def _metadata(found: object) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"holds a {METADATA} that is no table of texts")
    return found


def _tensors(header: Mapping[str, Any], start: int) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
            raise ValueError(f"names a tensor {name[:_MAX_NAME]!r}, of {len(name)} characters")
        if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"says not what {name!r} is")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise ValueError(f"gives {name!r} the unknown dtype {reprlib.repr(dtype)}")
        if not _are_sizes(shape):
            raise ValueError(f"gives {name!r} the shape {reprlib.repr(shape)}")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"gives {name!r} the place {reprlib.repr(offsets)}")
        if math.prod(shape) * DTYPE_BITS[dtype] != (offsets[1] - offsets[0]) * 8:
            raise ValueError(f"gives {name!r} {offsets[1] - offsets[0]} bytes for {dtype} {reprlib.repr(shape)}")
        yield name, StoredTensor(dtype=dtype, shape=tuple(shape), start=start + offsets[0], stop=start + offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in values
    )


def _check_tiling(tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    for name, tensor in tensors.items():
        if tensor.start != start:
            raise ValueError(f"leaves a gap before {name!r} or lets it overlap another tensor")
        start = tensor.stop
    if start != size:
        raise ValueError(f"promises {start} bytes, the file has {size}")
