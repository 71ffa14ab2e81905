"""Where SGLang keeps each module of a HF model, and under which target it switches that module's LoRA on.

Taken from `sglang.srt.lora` (`lora.py`, `utils.py`, `mem_pool.py`) of SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.multimodal import Multimodal
from lora_plugins_sdk.peft_names import FACTOR, factor_name
from lora_plugins_sdk.site import EXPERT

_IN_LAYER = re.compile(r"(?:model\.|language_model\.|llm\.)*(?P<layers>layers)\.(?P<layer>\d+)\.(?P<path>.+)")
_PUBLISHED = "llm."  # Inkling's files; no HF name begins so
_EXPERT = re.compile(r"mlp\.experts\.(?:(?P<expert>\d+)\.)?(?P<leaf>\w+)")
_MLP = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_QKV = {f"self_attn.{leaf}": "qkv_proj" for leaf in ("q_proj", "k_proj", "v_proj")}
IN_PROJ_QKV = "linear_attn.in_proj_qkv"
"""One projection in HF; `in_proj_q`, `in_proj_k` and `in_proj_v` on SGLang."""
_USUAL = {
    **_QKV,
    "self_attn.o_proj": "o_proj",
    **{f"mlp.{leaf}": target for leaf, target in _MLP.items()},
    **{f"mlp.shared_expert.{leaf}": target for leaf, target in _MLP.items()},
    IN_PROJ_QKV: "in_proj_qkvz",
    "linear_attn.in_proj_z": "in_proj_qkvz",
    "linear_attn.out_proj": "out_proj",
}
EMBEDDING = "embed_tokens"
OUTSIDE = (EMBEDDING, "lm_head")
"""What SGLang serves LoRA on beside the layers."""
HELD_AT_ZERO = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
"""SGLang serves no LoRA there, but serves the rest of that linear: runs hold these at zero (`pinned_modules`)."""
_INKLING = {
    "self_attn.q_proj": ("attn.wq_du", "qkvr"),
    "self_attn.k_proj": ("attn.wk_dv", "qkvr"),
    "self_attn.v_proj": ("attn.wv_dv", "qkvr"),
    "self_attn.r_proj": ("attn.wr_du", "qkvr"),
    "self_attn.o_proj": ("attn.wo_ud", "wo_ud"),
    **{f"mlp.{leaf}": (f"mlp.{leaf}", target) for leaf, target in _MLP.items()},
    **{f"mlp.shared_experts.{leaf}": (f"mlp.shared_experts.{leaf}", target) for leaf, target in _MLP.items()},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where SGLang expects one module's factors.

    Args:
        module: its name there, without the prefixes that wrap a language model.
        target: the normalised name in `target_modules`.
        layer: the layer's number; None for the embedding and the head.
        experts: whether these are routed experts.
        expert: one expert's number; None for all experts in one tensor, and where there are none.
    """

    module: str
    target: str
    layer: int | None = None
    experts: bool = False
    expert: int | None = None


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a language model: those of the config, and of its `text_config` where there is one."""
    part = hf_config.get("text_config")
    return {**hf_config, **part} if isinstance(part, Mapping) else hf_config


def family_of(hf_config: Mapping[str, Any]) -> str:
    """`inkling` or `usual`: how SGLang names the model's modules."""
    return "inkling" if str(text_config(hf_config).get("model_type", "")).startswith("inkling") else "usual"


def is_delta_net_hybrid(hf_config: Mapping[str, Any]) -> bool:
    """Whether the model is of the Qwen3-Next and Qwen3.5 kind: gated delta nets and attention with output gates."""
    return str(text_config(hf_config).get("model_type", "")).startswith(("qwen3_5", "qwen3_next"))


def place_of(module: str, family: str = "usual") -> Place | None:
    """Where SGLang has a HF module; None when it cannot serve LoRA there.

    Args:
        module: full HF name, for example `model.layers.0.mlp.up_proj`.
        family: see `family_of`.
    """
    leaf = module.rsplit(".", 1)[-1]
    if leaf in OUTSIDE and "layers." not in module:
        return Place(module=leaf, target=leaf)
    found = _IN_LAYER.fullmatch(module)
    if found is None:
        return None
    layer, path = int(found["layer"]), found["path"]
    expert = _EXPERT.fullmatch(path)
    if expert is not None and expert["leaf"] in _MLP:
        number = None if expert["expert"] is None else int(expert["expert"])
        return Place(
            module=f"layers.{layer}.{path}", target=_MLP[expert["leaf"]], layer=layer, experts=True, expert=number
        )
    name, target = _INKLING.get(path, ("", "")) if family == "inkling" else (path, _USUAL.get(path, ""))
    return Place(module=f"layers.{layer}.{name}", target=target, layer=layer) if target else None


def serving_name(hf_name: str, family: str = "usual") -> str | None:
    """The name of a factor in an export for SGLang; None when it cannot serve LoRA there.

    Args:
        hf_name: name in a PEFT adapter file. `{expert}` stays; one with three tensors there has `{q,k,v}`.
        family: see `family_of`.
    """
    found = FACTOR.fullmatch(hf_name)
    place = None if found is None else place_of(found["module"].replace(EXPERT, "0"), family)
    if found is None or place is None:
        return None
    module = place.module.replace(".experts.0.", f".experts.{EXPERT}.") if EXPERT in hf_name else place.module
    if module.endswith(IN_PROJ_QKV):
        module = module.removesuffix("qkv") + "{q,k,v}"
    return file_name(module, found["factor"])


def file_name(module: str, factor: str) -> str:
    """The name of one factor in a file for SGLang.

    Args:
        module: in SGLang's terms, for example `layers.0.attn.wq_du`.
        factor: `"A"` or `"B"`.
    """
    path = module if module == "lm_head" else f"model.{module}"
    return factor_name(path, factor, embedding=module == EMBEDDING)


def peft_path(path: str, family: str = "usual") -> str:
    """The HF path of a module that SGLang has; the inverse of `place_of`'s `module`, but for `in_proj_qkv`.

    Args:
        path: for example `layers.0.attn.wq_du`.
        family: see `family_of`.
    """
    found = _IN_LAYER.fullmatch(path)
    if found is None or family != "inkling":
        return path
    hf = {name: leaf for leaf, (name, _) in _INKLING.items()}
    return f"layers.{found['layer']}.{hf.get(found['path'], found['path'])}"


def layer_prefix(base_names: Iterable[str], hf_config: Mapping[str, Any]) -> str:
    """What HF names of a base's layers begin with, before `layers.`.

    Args:
        base_names: its tensor names.
        hf_config: its config, which tells where transformers has a model that is published under other names.

    Raises:
        LoraError: nothing, or more than one thing.
    """
    found = {name[: match.start("layers")] for name in base_names if (match := _IN_LAYER.fullmatch(name))}
    if len(found) != 1:
        raise LoraError(
            "base",
            reason=f"its layers' names begin with {' and '.join(sorted(found)) or 'nothing known'}",
            cure="give the HF directory of the base that the adapter was exported for",
        )
    prefix = found.pop()
    return Multimodal().prefix_in(hf_config) if prefix.endswith(_PUBLISHED) else prefix


def served_leaves(family: str = "usual") -> list[str]:
    """Paths within a layer that SGLang serves, for an error's message."""
    return sorted([*(_INKLING if family == "inkling" else _USUAL), *(f"mlp.experts.{leaf}" for leaf in _MLP)])
