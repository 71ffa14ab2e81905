"""Files that are not what they seem: named damages for safetensors files, JSON files and directories."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[bytes], bytes]
Header = dict[str, Any]


def split(content: bytes) -> tuple[Header, bytes]:
    """The header and the data of a safetensors file."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def joined(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file, its header's length told as it is or otherwise."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def with_header(edit: Callable[[Header], object]) -> Damage:
    """Change the header, leave the data."""

    def damage(content: bytes) -> bytes:
        header, data = split(content)
        edit(header)
        return joined(header, data)

    return damage


def entry(**fields: Any) -> Damage:
    """Change what the header says of its first tensor with two dimensions."""

    def edit(header: Header) -> None:
        name = next(key for key, one in header.items() if len(one.get("shape", ())) == 2)
        header[name].update(fields)

    return with_header(edit)


def _swap_dimensions(header: Header) -> None:
    for one in header.values():
        if len(one.get("shape", ())) == 2:
            one["shape"].reverse()


def _twice(content: bytes) -> bytes:
    header, data = split(content)
    text = json.dumps(header)
    name = next(key for key in header if key != "__metadata__")
    return joined((text[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode(), data)


def _overlap(header: Header) -> None:
    one, other = [key for key in header if key != "__metadata__"][:2]
    size = header[other]["data_offsets"][1] - header[other]["data_offsets"][0]
    start = header[one]["data_offsets"][0]
    header[other]["data_offsets"] = [start, start + size]


SAFETENSORS: dict[str, Damage] = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "length only": lambda content: content[:8],
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a pickle": lambda content: b"\x80\x02}q\x00X\x01\x00\x00\x00a" + b"\0" * 200,
    "a zip": lambda content: b"PK\x03\x04" + content,
    "half of the header": lambda content: content[:40],
    "half of the data": lambda content: content[: -len(split(content)[1]) // 2],
    "one byte short": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "length of a terabyte": lambda content: joined(*split(content), length=2**40),
    "length of all bits": lambda content: joined(*split(content), length=2**64 - 1),
    "length of zero": lambda content: joined(*split(content), length=0),
    "length into the data": lambda content: joined(*split(content), length=len(content) - 8),
    "header is a list": lambda content: joined(b"[]", b""),
    "header is a number": lambda content: joined(b"7", b""),
    "header is nested": lambda content: joined(b"[" * 100_000, b""),
    "header is nested objects": lambda content: joined(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b""),
    "header is not UTF-8": lambda content: joined(b'{"\xff\xfe": 1}', b""),
    "header is cut": lambda content: joined(json.dumps(split(content)[0]).encode()[:-1], split(content)[1]),
    "header holds nothing": lambda content: joined({}, b""),
    "data without a header": lambda content: joined({}, split(content)[1]),
    "entry is a list": with_header(lambda header: header.update(x=[1])),
    "entry is empty": with_header(lambda header: header.update(x={})),
    "entry is null": with_header(lambda header: header.update(x=None)),
    "metadata is a list": with_header(lambda header: header.update(__metadata__=["pt"])),
    "metadata of numbers": with_header(lambda header: header.update(__metadata__={"a": 1})),
    "a tensor twice": _twice,
    "tensors overlap": with_header(_overlap),
    "name with a NUL": with_header(lambda header: header.update({"a\0b": header.popitem()[1]})),
    "name with an escape": with_header(lambda header: header.update({"\x1b[2Ja": header.popitem()[1]})),
    "name of a megabyte": with_header(lambda header: header.update({"a" * 10**6: header.popitem()[1]})),
    "dtype of a megabyte": entry(dtype="F" * 10**6),
    "shape of a megabyte": entry(shape=[1] * 10**6 + [2]),
    "name is empty": with_header(lambda header: header.update({"": header.popitem()[1]})),
    "name is a path": with_header(lambda header: header.update({"../../etc/passwd": header.popitem()[1]})),
    "dtype unknown": entry(dtype="F31"),
    "dtype in lower case": entry(dtype="f32"),
    "dtype null": entry(dtype=None),
    "dtype a list": entry(dtype=["F32"]),
    "dtype of another size": entry(dtype="F64"),
    "dtype of four bits": entry(dtype="F4"),
    "dtype integer": entry(dtype="I32"),
    "shape negative": entry(shape=[-1, -1]),
    "shape of a zero": entry(shape=[0, 2**62]),
    "shape overflows": entry(shape=[2**33, 2**33]),
    "shape beyond 64 bits": entry(shape=[2**70, 1]),
    "shape of floats": entry(shape=[2.0, 2.0]),
    "shape of texts": entry(shape=["2", "2"]),
    "shape of booleans": entry(shape=[True, True]),
    "shape a number": entry(shape=24),
    "shape null": entry(shape=None),
    "shapes transposed": with_header(_swap_dimensions),
    "offsets of one": entry(data_offsets=[0]),
    "offsets of three": entry(data_offsets=[0, 1, 2]),
    "offsets negative": entry(data_offsets=[-8, 8]),
    "offsets reversed": entry(data_offsets=[96, 0]),
    "offsets beyond the file": entry(data_offsets=[2**40, 2**40 + 96]),
    "offsets beyond 64 bits": entry(data_offsets=[0, 2**80]),
    "offsets null": entry(data_offsets=None),
    "all NaN": lambda content: joined(split(content)[0], b"\xff" * len(split(content)[1])),
}

JSON: dict[str, Damage] = {
    "empty": lambda content: b"",
    "spaces": lambda content: b"   ",
    "cut": lambda content: content[:-2],
    "text": lambda content: b"hello",
    "a list": lambda content: b"[" + content + b"]",
    "a number": lambda content: b"3",
    "null": lambda content: b"null",
    "not UTF-8": lambda content: b'{"\xff": 1}',
    "binary": lambda content: bytes(range(256)),
    "nested": lambda content: b'{"a":' + b"[" * 100_000,
    "number of 5000 digits": lambda content: b'{"r": ' + b"9" * 5000 + b"}",
    "key twice": lambda content: content.rstrip()[:-1] + b"," + content.strip()[1:],
    "single quotes": lambda content: content.replace(b'"', b"'"),
}

INDEXES: dict[str, Any] = {
    "no weight_map": {},
    "weight_map a list": {"weight_map": ["model.safetensors"]},
    "weight_map empty": {"weight_map": {}},
    "weight_map null": {"weight_map": None},
    "file a number": {"weight_map": {"a": 1}},
    "file null": {"weight_map": {"a": None}},
    "file empty": {"weight_map": {"a": ""}},
    "file absent": {"weight_map": {"a": "absent.safetensors"}},
    "file the directory": {"weight_map": {"a": "."}},
    "file the parent": {"weight_map": {"a": ".."}},
    "file outside": {"weight_map": {"a": "../outside.safetensors"}},
    "file outside by a detour": {"weight_map": {"a": "assets/../../outside.safetensors"}},
    "file absolute": {"weight_map": {"a": "/etc/passwd"}},
    "file in a folder": {"weight_map": {"a": "assets/picture.bin"}},
    "file with a NUL": {"weight_map": {"a": "model\0.safetensors"}},
    "file too long": {"weight_map": {"a": "x" * 5000}},
    "file a surrogate": {"weight_map": {"a": "\ud800"}},
    "file no safetensors": {"weight_map": {"a": "tokenizer.json"}},
}


def _link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


PLACES: dict[str, Callable[[Path], None]] = {
    "absent": Path.unlink,
    "a directory": _folder,
    "a pipe": _fifo,
    "a link to nowhere": lambda path: _link(path, path.with_name("nowhere")),
    "a link to itself": lambda path: _link(path, path),
    "a link to a name too long": lambda path: _link(path, Path("x" * 300)),
    "a link to a device": lambda path: _link(path, Path("/dev/zero")),
    "a link to a directory": lambda path: _link(path, path.parent.parent),
}
