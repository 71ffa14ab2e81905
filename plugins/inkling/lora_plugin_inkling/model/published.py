"""Inkling's published weights (`model.llm.*`, gate and up rows in turn) and transformers' layout, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX = "model.llm."
MODEL = "model."


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """One published tensor and what it is in transformers' layout.

    Args:
        published: name after `model.llm.`, `{layer}` for the layer number.
        hf: names in transformers' layout: one, or gate and up.
        alternating: dimension along which the published tensor has rows of gate and up in turn; None where the tensor
            is the same in both. transformers has them one after the other there, or in two tensors.
    """

    published: str
    hf: tuple[str, ...]
    alternating: int | None = None


def _layer(published: str, *hf: str, alternating: int | None = None) -> Pairing:
    names = tuple(f"model.layers.{{layer}}.{name}" for name in hf)
    return Pairing(published=f"layers.{{layer}}.{published}", hf=names, alternating=alternating)


PAIRINGS = (
    Pairing(published="embed.weight", hf=("model.embed_tokens.weight",)),
    Pairing(published="embed_norm.weight", hf=("model.embed_tokens.embed_norm.weight",)),
    Pairing(published="norm.weight", hf=("model.norm.weight",)),
    Pairing(published="unembed.weight", hf=("lm_head.weight",)),
    _layer("attn_norm.weight", "input_layernorm.weight"),
    _layer("attn.wq_du.weight", "self_attn.q_proj.weight"),
    _layer("attn.wk_dv.weight", "self_attn.k_proj.weight"),
    _layer("attn.wv_dv.weight", "self_attn.v_proj.weight"),
    _layer("attn.wr_du.weight", "self_attn.r_proj.weight"),
    _layer("attn.wo_ud.weight", "self_attn.o_proj.weight"),
    _layer("attn.q_norm.weight", "self_attn.q_norm.weight"),
    _layer("attn.k_norm.weight", "self_attn.k_norm.weight"),
    _layer("attn.k_sconv.weight", "self_attn.k_sconv.conv1d.weight"),
    _layer("attn.v_sconv.weight", "self_attn.v_sconv.conv1d.weight"),
    _layer("attn.rel_logits_proj.proj", "self_attn.rel_logits_proj.proj"),
    _layer("attn_sconv.weight", "attn_sconv.conv1d.weight"),
    _layer("mlp_norm.weight", "post_attention_layernorm.weight"),
    _layer("mlp.w13_dn.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", alternating=0),
    _layer("mlp.w2_md.weight", "mlp.down_proj.weight"),
    _layer("mlp.global_scale", "mlp.global_scale"),
    _layer("mlp.gate.weight", "mlp.gate.weight"),
    _layer("mlp.gate.global_scale", "mlp.gate.global_scale"),
    _layer("mlp.gate.bias", "mlp.gate.e_score_correction_bias"),
    _layer("mlp.experts.w13_weight", "mlp.experts.gate_up_proj", alternating=1),
    _layer("mlp.experts.w2_weight", "mlp.experts.down_proj"),
    _layer(
        "mlp.shared_experts.shared_w13_weight",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        alternating=1,
    ),
    _layer("mlp.shared_experts.shared_w2_weight", "mlp.shared_experts.down_proj"),
    _layer("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
)
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_BY_PUBLISHED = {PREFIX + one.published: one for one in PAIRINGS}
_BY_HF = {name: one for one in PAIRINGS for name in one.hf}


def pairing_of(name: str) -> tuple[Pairing, str | None] | None:
    """The pairing that a tensor of either layout belongs to, and its layer number; None for any other tensor."""
    found = _LAYER.search(name)
    general = _LAYER.sub("{layer}", name, count=1)
    pairing = _BY_PUBLISHED.get(general) or _BY_HF.get(general)
    return None if pairing is None else (pairing, found and found[0])


def from_published(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One published tensor in transformers' layout: (name, tensor). Tensors of the towers come back as they are."""
    found = pairing_of(name)
    if found is None:
        yield name, tensor
        return
    pairing, layer = found
    names = [one.format(layer=layer) for one in pairing.hf]
    if pairing.alternating is None:
        yield names[0], tensor
        return
    halves = tensor.unflatten(pairing.alternating, (-1, 2)).unbind(pairing.alternating + 1)
    if len(names) == 1:
        yield names[0], torch.cat(halves, dim=pairing.alternating)
    else:
        yield from ((one, half.contiguous()) for one, half in zip(names, halves, strict=True))


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' layout in the published one; the inverse of `from_published`.

    Args:
        tensors: any of a model's; gate and up must come together. Others than the language model's stay as they are.
    """
    published = {}
    for name, tensor in tensors.items():
        found = pairing_of(name)
        if found is None:
            published[name] = tensor
            continue
        pairing, layer = found
        target, dim = PREFIX + pairing.published.format(layer=layer), pairing.alternating
        if dim is None:
            published[target] = tensor
        elif target not in published:
            parts = [tensors[one.format(layer=layer)] for one in pairing.hf]
            gate, up = parts if len(parts) == 2 else tensor.chunk(2, dim)
            published[target] = torch.stack([gate, up], dim + 1).flatten(dim, dim + 1)
    return published
