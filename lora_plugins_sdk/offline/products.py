"""Norms and differences of low-rank products `B A` without ever holding one whole."""

from __future__ import annotations

import math

import torch

from lora_plugins_sdk.offline.adapter import LoraPair

_CHUNK_ELEMENTS = 2**21


def product_norm(pair: LoraPair) -> float:
    """Frobenius norm of `B A`, from r x r products: `|B A|^2 = tr((B'B)(A A'))`."""
    a, b = pair.a.double(), pair.b.double()
    return math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))


def largest_difference(one: LoraPair, scale: float, other: LoraPair, other_scale: float) -> float:
    """Largest absolute entry of `scale * B A - other_scale * B' A'`; both products are `[out, in]`.

    Exactly 0.0 for equal factors and scales. The ranks may differ.
    """
    if scale == other_scale and torch.equal(one.a, other.a) and torch.equal(one.b, other.b):
        return 0.0
    left = torch.cat([one.b.double() * scale, other.b.double() * -other_scale], dim=1)
    right = torch.cat([one.a.double(), other.a.double()])
    rows = max(1, _CHUNK_ELEMENTS // right.shape[1])
    return max(float((part @ right).abs().max()) for part in left.split(rows))
