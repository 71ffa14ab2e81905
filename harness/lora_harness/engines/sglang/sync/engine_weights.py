"""The base's weights as SGLang holds them.

q, k and v are rows of one parameter there, gate and up of another, all experts of a layer of two, and the vocabulary is
padded (SGLang 0.5.23).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.serving.sglang_places import family_of
from lora_plugins_sdk.weight_files import WeightFiles

# Leaf of an engine's parameter -> the HF projections whose rows it holds, in order.
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# An engine's parameter of all experts -> the HF projections of each, expert by expert; and the tensor that has the
# same bytes in a base with fused experts.
EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_FUSED = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
_PACKED_IN = {part: (leaf, parts) for leaf, parts in PACKED.items() for part in parts}
_EXPERTS_IN = {part: (leaf, parts) for leaf, parts in EXPERTS.items() for part in parts}
_EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj)\.weight")
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_MULTIPLE = 64
# Inkling, after `layers.N.`: an engine's parameter -> the published tensors that are its rows, where names differ.
_INKLING = {
    "attn.qkvr.weight": tuple(f"attn.{leaf}.weight" for leaf in ("wq_du", "wk_dv", "wv_dv", "wr_du")),
    "mlp.gate_up_proj.weight": ("mlp.w13_dn.weight",),
    "mlp.down_proj.weight": ("mlp.w2_md.weight",),
    "mlp.shared_experts.w13_weight": ("mlp.shared_experts.shared_w13_weight",),
    "mlp.shared_experts.w2_weight": ("mlp.shared_experts.shared_w2_weight",),
}
_INKLING_DOWN = "mlp.shared_experts.w2_weight"
_INKLING_IN = {part: held for held, parts in _INKLING.items() for part in parts}
_INKLING_VOCABULARY = {"embed.weight": "embed_tokens.weight", "unembed.weight": "lm_head.weight"}
_PUBLISHED = re.compile(r"model\.llm\.(?P<stem>layers\.\d+\.)?(?P<name>.+)")
# Rows of Inkling's router are padded to this; what chooses experts stays in fp32.
_ROUTER_MULTIPLE = 8
_ROUTER_FP32 = ("mlp.gate.bias", "mlp.gate.global_scale")
# Reported among the weights, though it follows from the config: the axis of each rotary lane of an image's positions.
_COMPUTED = ".rotary_emb.axis_map"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineWeight:
    """One parameter of the engine.

    Args:
        name: the engine's name.
        parts: HF tensors that are its rows, in order; expert by expert where it holds all of them.
        multiple: rows of zeros follow, up to a multiple of this.
        turned: whether it has each matrix transposed.
        plus_one: whether it is one more than the HF tensor (a norm that HF stores around zero).
        dtype: where it is not the engine's.
    """

    name: str
    parts: tuple[str, ...]
    multiple: int = 1
    turned: bool = False
    plus_one: bool = False
    dtype: torch.dtype | None = None

    def whole(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """The parameter's values in the order of its memory; experts `[experts, rows, in]` are `[experts * rows, in]`.

        Args:
            parts: HF tensors in the order of `self.parts`.
            dtype: the engine's.
        """
        tensors = [one.to(self.dtype or dtype) for one in parts]
        rows = sum(one.shape[0] for one in tensors)
        if rows % self.multiple:
            tensors.append(tensors[0].new_zeros(-rows % self.multiple, *tensors[0].shape[1:]))
        held = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        held = (held.transpose(-2, -1) if self.turned else held).contiguous()
        return held + 1 if self.plus_one else held


def engine_weights(base: WeightFiles, hf_config: Mapping[str, Any]) -> dict[str, EngineWeight]:
    """The engine's parameters by name.

    Args:
        base: the HF directory it serves.
        hf_config: its `config.json`.
    """
    if family_of(hf_config) == "inkling":
        return {one.name: one for one in _of_inkling(base)}
    tied = bool(hf_config.get("tie_word_embeddings"))
    experts = _experts_of(base)
    held = (_weight(name, base, experts) for name in base.where if not (tied and name.endswith("lm_head.weight")))
    if str(hf_config.get("model_type", "")).startswith("qwen3_5"):
        held = (one for weight in held for one in _of_qwen3_5(weight))
    return {one.name: one for one in held}


def _experts_of(base: WeightFiles) -> dict[str, list[int]]:
    """Path of a layer's experts -> their numbers in order, where each has tensors of its own."""
    found: dict[str, set[int]] = {}
    for one in filter(None, map(_EXPERT.fullmatch, base.where)):
        found.setdefault(one["block"], set()).add(int(one["expert"]))
    return {block: sorted(numbers) for block, numbers in found.items()}


def _weight(name: str, base: WeightFiles, experts: Mapping[str, list[int]]) -> EngineWeight:
    """The parameter that holds a HF tensor."""
    if expert := _EXPERT.fullmatch(name):
        block = expert["block"]
        packed, leaves = _EXPERTS_IN[expert["leaf"]]
        parts = (f"{block}.{number}.{leaf}.weight" for number in experts[block] for leaf in leaves)
        return EngineWeight(name=f"{block}.{packed}", parts=tuple(parts))
    module, _, kind = name.rpartition(".")
    stem, _, leaf = module.rpartition(".")
    if leaf == "experts" and kind in _FUSED:
        return EngineWeight(name=f"{module}.{_FUSED[kind]}", parts=(name,))
    packed, leaves = _PACKED_IN.get(leaf, (leaf, ()))
    whole = tuple(f"{stem}.{part}.{kind}" for part in leaves)
    if whole and all(one in base.where for one in whole):
        return EngineWeight(name=f"{stem}.{packed}.{kind}", parts=whole)
    return EngineWeight(name=name, parts=(name,), multiple=_VOCABULARY_MULTIPLE if leaf in _VOCABULARY else 1)


def _of_qwen3_5(weight: EngineWeight) -> Iterator[EngineWeight]:
    """The same in a Qwen3.5: names are shorter, decays stay in fp32, and beside each norm that is stored around zero is
    what it multiplies by. Weights of draft tokens are not served."""
    if weight.name.startswith("mtp."):
        return
    name = weight.name
    if name.startswith("model.visual."):
        name = name.removeprefix("model.").replace(".attn.qkv.", ".attn.qkv_proj.")
        # Its places are a vocabulary to SGLang.
        places = name == "visual.pos_embed.weight"
        yield replace(weight, name=name, multiple=_VOCABULARY_MULTIPLE if places else 1)
        return
    name = name.replace("model.language_model.", "model.", 1).replace(".self_attn.", ".")
    yield replace(weight, name=name, dtype=torch.float32 if name.endswith(".A_log") else None)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield replace(weight, name=f"{name.removesuffix('weight')}gemma_weight", plus_one=True)


def _of_inkling(base: WeightFiles) -> Iterator[EngineWeight]:
    """The parameters of a published Inkling; its towers are not served."""
    for stored in base.where:
        found = _PUBLISHED.fullmatch(stored)
        if found is None:
            continue
        stem, name = found["stem"] or "", found["name"]
        held = _INKLING_IN.get(name, name)
        parts = _INKLING.get(held, (name,))
        if name != parts[0]:
            continue
        vocabulary = None if stem else _INKLING_VOCABULARY.get(name)
        yield EngineWeight(
            name=f"llm.{stem}{vocabulary or held}",
            parts=tuple(f"model.llm.{stem}{part}" for part in parts),
            multiple=_VOCABULARY_MULTIPLE if vocabulary else _ROUTER_MULTIPLE if name == "mlp.gate.weight" else 1,
            dtype=torch.float32 if name in _ROUTER_FP32 else None,
        )
        if held == _INKLING_DOWN:
            # What it multiplies by, side by side for all shared experts; made anew whenever they change.
            yield EngineWeight(name=f"llm.{stem}{held.removesuffix('w2_weight')}_w2_lin", parts=(stored,), turned=True)


def differences(expected: Mapping[str, str], reported: Mapping[str, str]) -> list[str]:
    """Names of parameters that are not what they must be, missing and unknown ones among them."""
    names = sorted(expected.keys() | reported.keys())
    return [one for one in names if expected.get(one) != reported.get(one) and not one.endswith(_COMPUTED)]
