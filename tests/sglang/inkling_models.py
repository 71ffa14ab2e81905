"""A small Inkling as it is published, and an adapter on every module of it that SGLang can serve.

Run these in a process that never imports SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from handmade_adapter import HandmadeAdapter
from moe_models import add_experts, merged_logprobs

TARGETS = ["qkvr", "wo_ud", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"]
# Of transformers. Window, extent and log scaling are shorter than a prompt, so that each of them shows.
FIELDS: dict[str, Any] = dict(
    vocab_size=320,
    unpadded_vocab_size=300,
    hidden_size=64,
    num_hidden_layers=4,
    layer_types=["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_head_dim=8,
    sliding_window_size=7,
    d_rel=6,
    rel_extent=13,
    log_scaling_n_floor=5,
    log_scaling_alpha=0.3,
    conv_kernel_size=4,
    intermediate_size=96,  # widths are multiples of 32, to which SGLang pads them on a CPU, but not adapters
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    route_scale=2.5,
    logits_mup_width_multiplier=3.0,
    max_position_embeddings=512,
)
HF_FOLDER = "transformers"


def make_inkling(folder: str, **fields: Any) -> None:
    """The published layout with random fp32 weights in `folder`, and transformers' in its subfolder `HF_FOLDER`."""
    from safetensors.torch import save_file
    from transformers import InklingForCausalLM, InklingTextConfig

    from lora_plugins_sdk import BaseCheckpoint, load_plugin

    torch.manual_seed(0)
    model = InklingForCausalLM(InklingTextConfig(**{**FIELDS, **fields})).float().eval()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            # Norms and scales around where they begin, everything else wide enough to matter.
            around = weight if "norm" in name or "global_scale" in name else 0
            weight.copy_(around + 0.1 * torch.randn_like(weight))
    path = Path(folder)
    model.save_pretrained(path / HF_FOLDER)
    base = BaseCheckpoint(config=json.loads(model.config.to_json_string()), tensors=model.state_dict())
    published = load_plugin("inkling_text").published_base(base)
    tensors = {name: tensor.contiguous() for name, tensor in published.tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(published.config))


def inkling_adapter(layout: str, names: str = "sglang", without: Sequence[str] = ()) -> HandmadeAdapter:
    """Attention with relative states, dense layers, routed and shared experts, the embedding and the head.

    Args:
        layout: of the routed experts, see `add_experts`.
        names: `sglang` for SGLang's own, `hf` for those that a trainer exports.
        without: leaves of HF's names to leave out.
    """
    adapter = HandmadeAdapter()
    hidden, moe, shared = FIELDS["hidden_size"], FIELDS["moe_intermediate_size"], FIELDS["n_shared_experts"]
    ours = names == "sglang"
    for layer, (kind, mlp) in enumerate(zip(FIELDS["layer_types"], FIELDS["mlp_layer_types"], strict=True)):
        prefix = "swa_" if kind == "hybrid_sliding" else ""
        heads, groups, width = (
            FIELDS[prefix + key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        shapes = {
            "q": ("wq_du", heads * width, hidden),
            "k": ("wk_dv", groups * width, hidden),
            "v": ("wv_dv", groups * width, hidden),
            "r": ("wr_du", heads * FIELDS["d_rel"], hidden),
            "o": ("wo_ud", hidden, heads * width),
        }
        for leaf, (name, out_dim, in_dim) in shapes.items():
            hf = f"layers.{layer}.self_attn.{leaf}_proj"
            if f"{leaf}_proj" not in without:
                module = f"layers.{layer}.attn.{name}" if ours else hf
                adapter.add(module, f"model.{hf}.weight", out_dim, in_dim)
        if mlp == "dense":
            add_gated_mlp(adapter, f"layers.{layer}.mlp", FIELDS["intermediate_size"], ".weight")
        else:
            add_experts(adapter, layer, SimpleNamespace(**FIELDS, num_experts=FIELDS["n_routed_experts"]), layout)
            outer = {"experts_a": 1, "experts_b": shared}
            if ours and layout == "per_expert":
                # SGLang has one layout for both banks; a factor that is shared has to be there once for each expert.
                outer = {"experts_a": shared, "experts_b": shared}
            add_gated_mlp(adapter, f"layers.{layer}.mlp.shared_experts", moe, "", **outer)
    if "embed_tokens" not in without:
        # SGLang's own form has no columns for the padding of the vocabulary.
        used = FIELDS["unpadded_vocab_size"]
        tokens = used if ours else FIELDS["vocab_size"]
        adapter.add_embedding("embed_tokens", "model.embed_tokens.weight", tokens, hidden, used=used)
    if "lm_head" not in without:
        adapter.add("lm_head", "lm_head.weight", FIELDS["unpadded_vocab_size"], hidden)
    return adapter


def add_gated_mlp(
    adapter: HandmadeAdapter,
    module: str,
    width: int,
    suffix: str,
    experts_a: int | None = None,
    experts_b: int | None = None,
) -> None:
    """Factors on gate, up and down; `experts_a` and `experts_b` are those of gate and up."""
    hidden = FIELDS["hidden_size"]
    for leaf in ("gate_proj", "up_proj"):
        weight = f"model.{module}.{leaf}{suffix}"
        adapter.add(f"{module}.{leaf}", weight, width, hidden, experts_a=experts_a, experts_b=experts_b)
    weight = f"model.{module}.down_proj{suffix}"
    adapter.add(f"{module}.down_proj", weight, hidden, width, experts_a=experts_b, experts_b=experts_a)


def save_inkling_adapter(folder: str, layout: str) -> None:
    """Write `inkling_adapter` for SGLang."""
    inkling_adapter(layout).save(folder, TARGETS)


def save_policy(folder: str, layout: str, without: Sequence[str] = ()) -> None:
    """Write `inkling_adapter` as a trainer exports it, in HF's names."""
    adapter = inkling_adapter(layout, "hf", without)
    adapter.save(folder, sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapter.tensors}))


def inkling_logprobs(
    model: str,
    sequences: Sequence[Sequence[int]],
    layout: str | None,
    names: str = "sglang",
    without: Sequence[str] = (),
) -> list[list[float]]:
    """Log-probabilities of tokens 1.. with the adapter of this layout merged into the weights."""
    adapter = None if layout is None else inkling_adapter(layout, names, without)
    return merged_logprobs(str(Path(model) / HF_FOLDER), sequences, adapter)
