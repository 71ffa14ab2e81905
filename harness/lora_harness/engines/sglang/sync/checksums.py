"""The checksums that SGLang reports for its weights, computed from what the weights must be.

SGLang 0.5.23 hashes a parameter's bytes: on a CPU with the first 64 bits of SHA-256, on a GPU with a sum of mixed
32-bit words (`sglang/kernels/ops/memory/gpu_tensor_hash.py`). Which one an engine uses shows in its first answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from lora_harness.engines.sglang.sync.package import raw_bytes

Checksum = Callable[[Tensor], str]

_TILE = 8192
_WORD, _LONG = 2**32 - 1, 2**64 - 1
_SEED = 0x243F6A88
# Of each of the two sums: start, factor on a word's position, bits that the position is turned by.
_SUMS = (
    (_SEED & _WORD, 0x27D4EB2D, 15),
    ((_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD, 0x165667B1, 13),
)
_WORDS_AT_ONCE = _TILE * 512


def on_cpu(tensor: Tensor) -> str:
    """Of an engine on the CPU."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()[:16]


def on_gpu(tensor: Tensor) -> str:
    """Of an engine on a GPU; computed on the trainer's GPU where it has one, since a CPU takes long.

    Words are mixed as MurmurHash3 finishes (fmix32), each after an exclusive or with its position, and summed up in
    tiles of 8192; the tiles' two sums are mixed, joined and summed up; SplitMix64's last steps end it.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    if torch.cuda.is_available():
        data = data.to("cuda")
    if data.numel() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    words = data.view(torch.int32)
    if not len(words):
        return f"{0:016x}"
    size = 4 * len(words) & _WORD
    total = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].to(torch.int64) & _WORD
        at = torch.arange(start, start + len(part), device=part.device) & _WORD
        high, low = (_tiles(part, at, size, *one) for one in _SUMS)
        # Sums wrap around at 64 bits, in torch as in the kernel.
        total += int(((high << 32) | low).sum())
    return f"{_splitmix(total & _LONG):016x}"


def _tiles(words: Tensor, at: Tensor, size: int, seed: int, factor: int, turn: int) -> Tensor:
    position = (_times(at, factor) + seed & _WORD) ^ ((at << turn & _WORD) | at >> (32 - turn))
    mixed = _fmix(words ^ position)
    mixed = torch.cat([mixed, mixed.new_zeros(-len(mixed) % _TILE)])
    return _fmix((mixed.view(-1, _TILE).sum(dim=1) & _WORD) ^ size)


def _fmix(words: Tensor) -> Tensor:
    words = words ^ words >> 16
    words = _times(words, 0x85EBCA6B)
    words = words ^ words >> 13
    words = _times(words, 0xC2B2AE35)
    return words ^ words >> 16


def _times(words: Tensor, factor: int) -> Tensor:
    # The lower 32 bits are right also where the product of two 32-bit numbers wraps around at 64.
    return words * factor & _WORD


def _splitmix(value: int) -> int:
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & _LONG
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & _LONG
    return value ^ value >> 31


def checksum_that_gives(reported: str | None, tensor: Tensor) -> Checksum | None:
    """The one by which an engine reported a tensor; None when it is neither, or the engine has another tensor."""
    return next((one for one in (on_cpu, on_gpu) if one(tensor) == reported), None)
