"""HF weights into a megatron-core hybrid by hand: a second opinion on every layout, sharing no code with the packs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor, nn


def copy_weights(model: nn.Module, hf: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Fill every parameter of this rank's stage from transformers' live state dict (experts fused)."""
    tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()

    def mine(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tp, dim)[rank]

    def vocabulary(weight: Tensor) -> Tensor:
        missing = -weight.shape[0] % tp
        return mine(nn.functional.pad(weight, (0, 0, 0, missing)))

    parameters = dict(model.named_parameters())
    done: set[str] = set()

    def put(name: str, value: Tensor) -> None:
        if name in parameters:
            assert parameters[name].shape == value.shape, f"{name}: {parameters[name].shape} {value.shape}"
            parameters[name].data.copy_(value)
            done.add(name)

    put("embedding.word_embeddings.weight", vocabulary(hf["model.embed_tokens.weight"]))
    put("decoder.final_layernorm.weight", hf["model.norm.weight"])
    put("output_layer.weight", vocabulary(hf["lm_head.weight"]))
    layers: Any = model.get_submodule("decoder.layers")
    for local, layer in enumerate(layers):
        name, source = f"decoder.layers.{local}", f"model.layers.{layer.layer_number - 1}"
        part = {key.removeprefix(f"{source}."): value for key, value in hf.items() if key.startswith(f"{source}.")}
        values = _linear_attention(part, config, mine) if "linear_attn.norm.weight" in part else _attention(part, mine)
        for key, value in (values | _experts(part, config, mine)).items():
            put(f"{name}.{key}", value)
    assert done == set(parameters), sorted(set(parameters) - done)


def _attention(hf: Mapping[str, Tensor], mine: Any) -> dict[str, Tensor]:
    size = hf["self_attn.q_norm.weight"].shape[0]
    key, value = (hf[f"self_attn.{name}_proj.weight"] for name in "kv")
    groups = key.shape[0] // size
    # HF: per head a query and a gate; here: per group all its queries, all its gates, the key, the value.
    query = hf["self_attn.q_proj.weight"].view(groups, -1, 2, size, key.shape[1]).transpose(1, 2)
    parts = [query.flatten(1, 3), key.view(groups, size, -1), value.view(groups, size, -1)]
    return {
        "self_attention.linear_qkv.weight": mine(torch.cat(parts, dim=1).flatten(0, 1)),
        "self_attention.linear_qkv.layer_norm_weight": hf["input_layernorm.weight"],
        "self_attention.q_layernorm.weight": hf["self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": hf["self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": mine(hf["self_attn.o_proj.weight"], 1),
    }


def _linear_attention(hf: Mapping[str, Tensor], config: Mapping[str, Any], mine: Any) -> dict[str, Tensor]:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]

    def by_kind(weight: Tensor) -> list[Tensor]:
        return [mine(part) for part in weight.split([keys, keys, values])]

    rest = [mine(hf[f"linear_attn.in_proj_{name}.weight"]) for name in "zba"]
    return {
        "self_attention.in_proj.weight": torch.cat([*by_kind(hf["linear_attn.in_proj_qkv.weight"]), *rest]),
        "self_attention.in_proj.layer_norm_weight": hf["input_layernorm.weight"],
        "self_attention.conv1d.weight": torch.cat(by_kind(hf["linear_attn.conv1d.weight"])),
        "self_attention.A_log": mine(hf["linear_attn.A_log"]),
        "self_attention.dt_bias": mine(hf["linear_attn.dt_bias"]),
        # The one norm that HF does not store zero-centred.
        "self_attention.out_norm.weight": hf["linear_attn.norm.weight"] - 1,
        "self_attention.out_proj.weight": mine(hf["linear_attn.out_proj.weight"], 1),
    }


def _experts(hf: Mapping[str, Tensor], config: Mapping[str, Any], mine: Any) -> dict[str, Tensor]:
    group: Any = ps.get_expert_tensor_parallel_group()
    etp, rank = group.size(), group.rank()
    here = config["num_experts"] // ps.get_expert_model_parallel_world_size()
    first = here * ps.get_expert_model_parallel_rank()
    shared = "mlp.shared_expert"
    values = {
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf["mlp.gate.weight"],
        "mlp.shared_experts.gate_weight": hf[f"{shared}_gate.weight"],
        "mlp.shared_experts.linear_fc1.weight": torch.cat(
            [mine(hf[f"{shared}.gate_proj.weight"]), mine(hf[f"{shared}.up_proj.weight"])]
        ),
        "mlp.shared_experts.linear_fc2.weight": mine(hf[f"{shared}.down_proj.weight"], 1),
    }
    for index in range(here):
        gate, up = hf["mlp.experts.gate_up_proj"][first + index].chunk(2)
        down = hf["mlp.experts.down_proj"][first + index]
        values[f"mlp.experts.linear_fc1.weight{index}"] = torch.cat([part.chunk(etp)[rank] for part in (gate, up)])
        values[f"mlp.experts.linear_fc2.weight{index}"] = down.chunk(etp, dim=1)[rank]
    return values
