"""One weight file with its deltas folded in: streamed, so that memory holds some rows and never a whole file."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.offline.fit import FOLDABLE, Fold
from lora_plugins_sdk.safetensors_header import SafetensorsHeader, StoredTensor, header_bytes

_TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CHUNK_BYTES = 2**20
_CHUNK_ELEMENTS = 2**18


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """What was done to one file.

    Args:
        folded: modules whose delta was added.
        lost: changed tensor -> Frobenius norm of what the cast to the stored dtype took away.
    """

    folded: list[str] = field(default_factory=list)
    lost: dict[str, float] = field(default_factory=dict)


def stored_dtype(tensor: StoredTensor, dtype: str | None) -> str:
    """The dtype a tensor is written in: `dtype` when it is given and the tensor is floating point."""
    return dtype if dtype is not None and tensor.dtype in FOLDABLE else tensor.dtype


def write_shard(
    source: SafetensorsHeader,
    target: Path,
    folds: Mapping[str, Sequence[Fold]],
    *,
    scale: float,
    dtype: str | None,
    advance: Callable[[int], None],
) -> WrittenShard:
    """Write one file: the same tensors in the same order, those with a fold changed.

    Without `dtype` the header and every other tensor are the same bytes as in the source.

    Args:
        source: header of the file to read.
        target: file to create.
        folds: tensor name -> folds, sorted by their first row.
        scale: factor on `B A`.
        dtype: safetensors dtype for every floating point tensor; None keeps each one's own.
        advance: is told how many bytes of the source were dealt with.

    Raises:
        LoraError: a result that is not finite, or a source that cannot be read to its end.
        OSError: the disk refuses to take the target.
    """
    written = WrittenShard()
    with source.path.open("rb") as read, target.open("xb") as write:
        if dtype is None:
            _copy(read, write, source.data_start)
        else:
            entries = {name: (stored_dtype(one, dtype), one.shape) for name, one in source.tensors.items()}
            write.write(header_bytes(entries, source.metadata))
            read.seek(source.data_start)
        for name, tensor in source.tensors.items():
            kind = stored_dtype(tensor, dtype)
            if name in folds:
                written.lost[name] = _fold(read, write, tensor, folds[name], scale, _TORCH[kind])
                written.folded.extend(fold.pair.module for fold in folds[name])
            elif kind != tensor.dtype:
                _cast(read, write, name, tensor, _TORCH[kind])
            else:
                _copy(read, write, tensor.num_bytes)
            advance(tensor.num_bytes)
    return written


def read_folded(source: SafetensorsHeader, name: str, folds: Sequence[Fold], *, scale: float) -> Tensor:
    """One tensor of a file with its deltas, in the dtype it is stored in; the file stays as it is.

    Args:
        source: header of the file.
        name: the tensor.
        folds: the deltas, sorted by their first row; none gives the tensor as it is stored.
        scale: factor on `B A`.

    Raises:
        LoraError: as `write_shard`.
    """
    tensor, sink = source.tensors[name], BytesIO()
    with source.path.open("rb") as read:
        read.seek(tensor.start)
        if folds:
            _fold(read, sink, tensor, folds, scale, _TORCH[tensor.dtype])
        else:
            _copy(read, sink, tensor.num_bytes)
    return torch.frombuffer(sink.getbuffer(), dtype=_TORCH[tensor.dtype]).view(tensor.shape)


def _fold(
    read: BinaryIO, write: BinaryIO, tensor: StoredTensor, folds: Sequence[Fold], scale: float, wanted: torch.dtype
) -> float:
    """Write `W + scale * B A`, added in float32 at least; returns the norm of (stored - exact)."""
    exact = torch.promote_types(_TORCH[tensor.dtype], torch.float32)
    waiting = deque(folds)
    scratch, back = torch.empty(0, dtype=exact), torch.empty(0, dtype=exact)
    squares, start, done = 0.0, 0, 0
    for chunk in _chunks(read, tensor, columns=tensor.shape[-1]):
        full = scratch.resize_(chunk.shape).copy_(chunk)
        stop = start + len(full)
        for fold in _within(waiting, stop):
            # Which of the fold's rows are in the chunk.
            first, last = (min(-(-max(0, row - fold.first) // fold.step), fold.rows) for row in (start, stop))
            at = fold.first + first * fold.step - start
            rows = full[at : at + (last - first - 1) * fold.step + 1 : fold.step] if last > first else full[:0]
            rows.addmm_(fold.pair.b[first:last].to(exact), fold.pair.a.to(exact), alpha=scale)
            done += last - first
        start = stop
        stored = full.to(wanted)
        lost = 0.0
        if wanted != exact:
            # Cast by itself: arithmetic between two dtypes is several times slower.
            error = full.sub_(back.resize_(full.shape).copy_(stored)).flatten()
            lost = float(error.dot(error))
            lost = lost if math.isfinite(lost) else float(error.double().square().sum())
        # A stored value that is not finite makes `lost` so too; only then, or without it, the values are looked at.
        if (wanted == exact or not math.isfinite(lost)) and not _is_finite(stored):
            raise LoraError(
                folds[0].tensor,
                reason=f"the fold is not finite in {wanted}: "
                + ("the base holds NaN or infinite values" if not _is_finite(chunk) else "the sum is too large"),
                cure="use a sound base, or --dtype float32",
            )
        _write(write, stored)
        squares += lost
    assert done == sum(fold.rows for fold in folds), "every row of every fold lies in the tensor"
    return math.sqrt(squares)


def _within(waiting: deque[Fold], stop: int) -> Iterator[Fold]:
    """The folds that begin before row `stop`, in order; those that end there too are taken out."""
    again = []
    while waiting and waiting[0].first < stop:
        fold = waiting.popleft()
        yield fold
        if fold.stop > stop:
            again.append(fold)
    waiting.extendleft(reversed(again))


def _cast(read: BinaryIO, write: BinaryIO, name: str, tensor: StoredTensor, wanted: torch.dtype) -> None:
    for chunk in _chunks(read, tensor, columns=1):
        stored = chunk.to(wanted)
        if not _is_finite(stored) and not torch.equal(stored.isfinite(), chunk.isfinite()):
            raise LoraError(name, reason=f"holds values too large for {wanted}", cure="use --dtype bfloat16 or float32")
        _write(write, stored)


def _chunks(read: BinaryIO, tensor: StoredTensor, columns: int) -> Iterator[Tensor]:
    """The tensor as a matrix, some rows at a time; each is valid until the next is asked for."""
    dtype = _TORCH[tensor.dtype]
    rows = math.prod(tensor.shape) // columns
    step = min(rows, max(1, _CHUNK_ELEMENTS // columns))
    buffer = bytearray(step * columns * dtype.itemsize)
    for start in range(0, rows, step or 1):
        part = memoryview(buffer)[: min(step, rows - start) * columns * dtype.itemsize]
        _fill(read, part)
        yield torch.frombuffer(part, dtype=dtype).view(-1, columns)


def _copy(read: BinaryIO, write: BinaryIO, size: int) -> None:
    buffer = memoryview(bytearray(min(size, _CHUNK_BYTES)))
    while size:
        part = buffer[: min(size, _CHUNK_BYTES)]
        _fill(read, part)
        write.write(part)
        size -= len(part)


def _fill(read: BinaryIO, buffer: memoryview) -> None:
    try:
        found = read.readinto(buffer)  # type: ignore[attr-defined]
    except OSError as error:
        raise LoraError(
            read.name, reason=f"cannot be read ({error.strerror})", cure="check the disk, or copy the base anew"
        ) from error
    if found != len(buffer):
        raise LoraError(read.name, reason="became shorter while it was read", cure="leave the base alone and try again")


def _write(write: BinaryIO, stored: Tensor) -> None:
    write.write(stored.contiguous().view(torch.uint8).numpy().data)


def _is_finite(values: Tensor) -> bool:
    # NaN wins in both, so two numbers tell; isfinite().all() would take several passes.
    low, high = torch.aminmax(values)
    return math.isfinite(low) and math.isfinite(high)
