"""Initial values that depend on the seed and the HF name alone, never on the topology."""

from __future__ import annotations

import hashlib
import math

import torch

from lora_plugins_sdk.shards import shard
from lora_plugins_sdk.table import ParamRow


def full_initial_factor(row: ParamRow, seed: int) -> torch.Tensor:
    """The whole logical factor `row.full_shape` in float32 on the CPU.

    B is zero. A is uniform in `+-1/sqrt(in)`: Kaiming-uniform with `a = sqrt(5)` over the full fan-in (He et al. 2015),
    what PEFT draws.
    """
    if row.factor == "B":
        return torch.zeros(row.full_shape)
    key = hashlib.sha256(f"{seed}:{row.init_key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    bound = 1.0 / math.sqrt(row.full_shape[1])
    return torch.empty(row.full_shape).uniform_(-bound, bound, generator=generator)


def initial_factor(row: ParamRow, seed: int, tp_rank: int) -> torch.Tensor:
    """This rank's part of the initial factor, `row.local_shape`, in the row's dtype."""
    return shard(row, full_initial_factor(row, seed), tp_rank).to(getattr(torch, row.dtype))
