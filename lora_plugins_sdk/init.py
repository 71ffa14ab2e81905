"""Initial values that depend on the seed and the HF name alone, never on the topology."""

from __future__ import annotations

import hashlib
import math

import torch

from lora_plugins_sdk.shards import Place, local_experts, tensor_parallel_part
from lora_plugins_sdk.table import ParamRow


def full_initial_factor(row: ParamRow, seed: int) -> torch.Tensor:
    """The whole logical factor `row.full_shape` in float32 on the CPU.

    B is zero. A is uniform in `+-1/sqrt(in)`: Kaiming-uniform with `a = sqrt(5)` over the full fan-in (He et al. 2015),
    what PEFT draws. Every expert draws with a key of its own.

    Of an embedding, as in PEFT, A is zero and B is normal with unit variance: each token has a column of A to itself,
    and one that training never sees then keeps its embedding.
    """
    return _initial(row, seed, range(row.full_shape[0]))


def initial_factor(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
    """This rank's part of the initial factor, `row.local_shape`, in the row's dtype; draws no expert of other ranks."""
    experts = _initial(row, seed, local_experts(row, place))
    return tensor_parallel_part(row, experts, place).to(getattr(torch, row.dtype))


def _initial(row: ParamRow, seed: int, experts: range) -> torch.Tensor:
    if not row.expert:
        return _draw(row, seed, row.init_key, row.full_shape)
    shape = row.full_shape[1:]
    return torch.stack([_draw(row, seed, row.init_key.format(expert=number), shape) for number in experts])


def _draw(row: ParamRow, seed: int, init_key: str, shape: tuple[int, ...]) -> torch.Tensor:
    if row.initially_zero:
        return torch.zeros(shape)
    key = hashlib.sha256(f"{seed}:{init_key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    if row.embedding:
        return torch.randn(shape, generator=generator)
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
