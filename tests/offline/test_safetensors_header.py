"""Our reading and writing of safetensors headers against the safetensors library."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_plugins_sdk.safetensors_header import DTYPE_BITS, header_bytes, read_header

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)))
METADATA = st.dictionaries(NAMES, st.text(max_size=10), max_size=3)
REPEATED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@REPEATED
@given(tensors=TENSORS, metadata=METADATA)
def test_what_the_library_writes_is_read(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "x.safetensors"
    made = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    save_file(made, path, metadata=metadata or None)
    header = read_header(path)
    assert {name: (one.dtype, list(one.shape)) for name, one in header.tensors.items()} == tensors
    assert all(one.num_bytes == made[name].nbytes for name, one in header.tensors.items())
    assert header.metadata == metadata
    content = path.read_bytes()
    assert header.data_start + sum(one.num_bytes for one in header.tensors.values()) == len(content)


@REPEATED
@given(tensors=TENSORS, metadata=METADATA)
def test_the_library_reads_what_is_written(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "x.safetensors"
    entries = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
    size = sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in entries.values())
    start = header_bytes(entries, metadata)
    path.write_bytes(start + bytes(size))
    assert len(start) % 8 == 0
    read = load_file(path)
    assert {name: (one.dtype, list(one.shape)) for name, one in read.items()} == {
        name: (DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()
    }
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == metadata
    assert list(read_header(path).tensors) == sorted(entries, key=lambda name: read_header(path).tensors[name].start)
