"""Factors of all experts in one tensor, taken apart into one pair an expert. Nothing is copied."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from lora_plugins_sdk.errors import Diagnostic

_EXPERTS = re.compile(r"(?P<block>.+\.(?:shared_)?experts)\.(?P<leaf>[^.]+)")


def is_packed(tensor: Tensor) -> bool:
    """Whether a factor is `[experts or 1, ..]`, 1 where all experts share it."""
    return tensor.dim() == 3


def packed_problems(module: str, a: Tensor, b: Tensor) -> Iterator[Diagnostic]:
    """Why a pair with a packed factor is no pair of all experts' factors."""
    if _EXPERTS.fullmatch(module) is None:
        yield Diagnostic(
            subject=module,
            reason=f"has factors of three dimensions, {list(a.shape)} and {list(b.shape)}, and is no experts' module",
            cure="save A as [rank, in] and B as [out, rank]",
        )
    elif a.dim() != b.dim():
        yield Diagnostic(
            subject=module,
            reason=f"has lora_A {list(a.shape)} and lora_B {list(b.shape)}: one is packed over the experts, one is not",
            cure="save both packed: [experts or 1, rank, in] and [experts or 1, out, rank]",
        )
    elif 1 not in (a.shape[0], b.shape[0]) and a.shape[0] != b.shape[0]:
        yield Diagnostic(
            subject=module,
            reason=f"has lora_A of {a.shape[0]} experts and lora_B of {b.shape[0]}",
            cure="export the adapter again; a factor is of all experts, or of 1 when they share it",
        )


def unpacked(module: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each expert's module (`BLOCK.experts.7.gate_proj`) with its `A` `[rank, in]` and `B` `[out, rank]`."""
    found = _EXPERTS.fullmatch(module)
    assert found is not None and is_packed(a) and is_packed(b), "the pair was checked"
    for expert in range(max(a.shape[0], b.shape[0])):
        name = f"{found['block']}.{expert}.{found['leaf']}"
        yield name, a[min(expert, a.shape[0] - 1)], b[min(expert, b.shape[0] - 1)]
