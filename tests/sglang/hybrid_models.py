"""A small Qwen3.5-MoE hybrid, and an adapter on every module of it that SGLang can serve.

Run these in a process that never imports SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from handmade_adapter import HandmadeAdapter
from moe_models import add_attention, add_experts, merged_logprobs

TARGETS = ["qkv_proj", "o_proj", "in_proj_qkvz", "out_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"]
FIELDS: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    # No multiples of 32, to which SGLang pads widths for its own CPU kernels, but not adapters.
    moe_intermediate_size=36,
    shared_expert_intermediate_size=52,
    num_experts=8,
    num_experts_per_tok=2,
    layer_types=["linear_attention", "full_attention"] * 2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    partial_rotary_factor=0.5,  # SGLang reads this one, transformers the one above
    max_position_embeddings=512,
    tie_word_embeddings=False,
    initializer_range=0.05,  # at 0.1 transformers in fp32 is 4e-6 off itself in fp64, here below 1e-6
)


def make_hybrid(folder: str, **fields: Any) -> None:
    """A text checkpoint (`Qwen3_5MoeForCausalLM`) with random fp32 weights: linear and full attention in turn."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(0)
    save(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**FIELDS, **fields})), folder)


def make_multimodal_hybrid(folder: str) -> None:
    """The same in a multimodal checkpoint (`Qwen3_5MoeForConditionalGeneration`) with a small vision tower."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    torch.manual_seed(0)
    text = {**FIELDS, "rope_parameters": {**FIELDS["rope_parameters"], "mrope_section": [2, 1, 1]}}
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=FIELDS["hidden_size"],
        patch_size=4,
        num_position_embeddings=16,
        deepstack_visual_indexes=[],
    )
    tokens: dict[str, Any] = dict(
        image_token_id=310, video_token_id=311, vision_start_token_id=312, vision_end_token_id=313
    )
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    save(Qwen3_5MoeForConditionalGeneration(config), folder)
    # SGLang asks for both, also where no image is ever sent.
    image, video = "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": image}))
    (Path(folder) / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": video}))


def save(net: Any, folder: str) -> None:
    """Write the model in fp32 with norms that are not at their initial values."""
    net = net.float()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    net.save_pretrained(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    # SGLang reads this where transformers reads layer_types.
    config.get("text_config", config)["full_attention_interval"] = 2
    path.write_text(json.dumps(config))


def hybrid_adapter(model: str, layout: str, gates: str = "") -> HandmadeAdapter:
    """Full attention, gated delta nets (q, k, v, z and the output), routed and shared experts of every layer; embedding
    and head.

    Args:
        model: HF directory.
        layout: of the routed experts, see `add_experts`.
        gates: without it the names are SGLang's. With it they are HF's, and in_proj_b and in_proj_a have factors too:
            `trained` ones, or `pinned` ones whose B is zero.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    adapter = HandmadeAdapter()
    hidden = config.hidden_size
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            add_attention(adapter, layer, config, output_gate=True)
        else:
            module = f"layers.{layer}.linear_attn"
            qkv = f"model.{module}.in_proj_qkv.weight"
            if gates:
                adapter.add(f"{module}.in_proj_qkv", qkv, 2 * key + value, hidden)
                for leaf in ("in_proj_b", "in_proj_a"):
                    weight = f"model.{module}.{leaf}.weight"
                    adapter.add(f"{module}.{leaf}", weight, config.linear_num_value_heads, hidden)
                    if gates == "pinned":
                        adapter.tensors[f"base_model.model.model.{module}.{leaf}.lora_B.weight"].zero_()
                        del adapter.deltas[weight]
            else:
                adapter.add(f"{module}.in_proj_q", qkv, key, hidden)
                adapter.add(f"{module}.in_proj_k", qkv, key, hidden, first_row=key)
                adapter.add(f"{module}.in_proj_v", qkv, value, hidden, first_row=2 * key)
            adapter.add(f"{module}.in_proj_z", f"model.{module}.in_proj_z.weight", value, hidden)
            adapter.add(f"{module}.out_proj", f"model.{module}.out_proj.weight", hidden, value)
        add_experts(adapter, layer, config, layout)
        shared, inner = f"layers.{layer}.mlp.shared_expert", config.shared_expert_intermediate_size
        adapter.add(f"{shared}.gate_proj", f"model.{shared}.gate_proj.weight", inner, hidden)
        adapter.add(f"{shared}.up_proj", f"model.{shared}.up_proj.weight", inner, hidden)
        adapter.add(f"{shared}.down_proj", f"model.{shared}.down_proj.weight", hidden, inner)
    tokens = config.vocab_size
    adapter.add_embedding("embed_tokens", "model.embed_tokens.weight", tokens, hidden, used=tokens)
    adapter.add("lm_head", "lm_head.weight", tokens, hidden)
    return adapter


def save_hybrid_adapter(model: str, folder: str, layout: str) -> None:
    """Write `hybrid_adapter` for SGLang."""
    hybrid_adapter(model, layout).save(folder, TARGETS)


def save_policy(model: str, folder: str, layout: str, gates: str) -> None:
    """Write `hybrid_adapter` as a trainer exports it, in HF's names."""
    adapter = hybrid_adapter(model, layout, gates)
    adapter.save(folder, sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapter.tensors}))


def hybrid_logprobs(
    model: str, sequences: Sequence[Sequence[int]], layout: str | None, gates: str = ""
) -> list[list[float]]:
    """Log-probabilities of tokens 1.. with the adapter of this layout merged into the weights."""
    return merged_logprobs(model, sequences, None if layout is None else hybrid_adapter(model, layout, gates))
