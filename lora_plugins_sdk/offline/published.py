"""Checkpoints whose files have other names, and other rows, than transformers' model: Inkling as it is published.

Names from transformers' `conversion_mapping` for `inkling_mm_model`; rows of gate and up lie in turn there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PREFIX = re.compile(r"model\.llm\.(?:(?P<layer>layers\.\d+\.))?(?P<name>.+)")
_MODULES: dict[str, tuple[str, ...]] = {
    "embed.weight": ("model.embed_tokens",),
    "unembed.weight": ("lm_head",),
    "attn.wq_du.weight": ("self_attn.q_proj",),
    "attn.wk_dv.weight": ("self_attn.k_proj",),
    "attn.wv_dv.weight": ("self_attn.v_proj",),
    "attn.wr_du.weight": ("self_attn.r_proj",),
    "attn.wo_ud.weight": ("self_attn.o_proj",),
    "mlp.w13_dn.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.w2_md.weight": ("mlp.down_proj",),
    "mlp.gate.weight": ("mlp.gate",),
    "mlp.experts.w13_weight": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "mlp.experts.w2_weight": ("mlp.experts.{expert}.down_proj",),
    "mlp.shared_experts.shared_w13_weight": (
        "mlp.shared_experts.{expert}.gate_proj",
        "mlp.shared_experts.{expert}.up_proj",
    ),
    "mlp.shared_experts.shared_w2_weight": ("mlp.shared_experts.{expert}.down_proj",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRows:
    """Some rows of a published tensor, all its dimensions but the last counted as rows.

    Args:
        module: the module in transformers' model that they are the weight of.
        first: the first of them.
        rows: how many.
        step: distance from one to the next.
    """

    module: str
    first: int
    rows: int
    step: int


def published_rows(name: str, shape: tuple[int, ...]) -> Iterator[PublishedRows] | None:
    """The linears in a published tensor; None for a tensor that is not published under such a name.

    Args:
        name: the stored tensor.
        shape: `[out, in]`, or `[experts, out, in]` where the names say so.
    """
    found = _PREFIX.fullmatch(name)
    modules = _MODULES.get(found["name"]) if found else None
    if found is None or modules is None or len(shape) != 2 + ("{expert}" in modules[0]) or 0 in shape:
        return None
    stem = f"model.{found['layer']}" if found["layer"] else ""
    return _rows(stem, modules, experts=shape[0] if len(shape) == 3 else 1, rows=shape[-2])


def _rows(stem: str, modules: tuple[str, ...], *, experts: int, rows: int) -> Iterator[PublishedRows]:
    for expert in range(experts):
        for number, module in enumerate(modules):
            yield PublishedRows(
                module=stem + module.format(expert=expert),
                first=expert * rows + number,
                rows=rows // len(modules),
                step=len(modules),
            )
