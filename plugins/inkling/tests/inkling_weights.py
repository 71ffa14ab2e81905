"""HF weights into the megatron-core model by hand: a second opinion on every layout, sharing no code with the packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor, nn


def host_tensors(model: nn.Module, hf: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What each parameter of this rank's stage must hold (or its gradient, given HF's gradients), by name.

    Args:
        hf: transformers' live state dict (experts fused), or gradients under the same names.
    """
    tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()

    def mine(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tp, dim)[rank]

    def vocabulary(weight: Tensor, rows: int) -> Tensor:
        return mine(nn.functional.pad(weight[:rows], (0, 0, 0, -rows % tp)))

    values = {
        "embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"], config["vocab_size"]),
        "embedding.norm.weight": hf["model.embed_tokens.embed_norm.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": vocabulary(hf["lm_head.weight"], config["unpadded_vocab_size"]),
    }
    layers: Any = model.get_submodule("decoder.layers")
    for local, layer in enumerate(layers):
        number = layer.layer_number - 1
        source = f"model.layers.{number}."
        part = {key.removeprefix(source): value for key, value in hf.items() if key.startswith(source)}
        sliding = config["layer_types"][number] == "hybrid_sliding"
        sparse = config["mlp_layer_types"][number] == "sparse"
        of_layer = _attention(part, "sliding_attention" if sliding else "self_attention", mine)
        of_layer |= _sparse(part, config, mine) if sparse else _dense(part, mine)
        of_layer |= {f"{name}.weight": part[f"{name}.conv1d.weight"] for name in ("attn_sconv", "mlp_sconv")}
        values |= {f"decoder.layers.{local}.{key}": value for key, value in of_layer.items()}
    held = dict(model.named_parameters())
    missing = held.keys() - values.keys()
    assert not missing, sorted(missing)
    return {name: value for name, value in values.items() if name in held}


def copy_weights(model: nn.Module, hf: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Fill every parameter of this rank's stage."""
    held = dict(model.named_parameters())
    for name, value in host_tensors(model, hf, config).items():
        assert held[name].shape == value.shape, f"{name}: {held[name].shape} {value.shape}"
        held[name].data.copy_(value)


def _attention(hf: Mapping[str, Tensor], name: str, mine: Callable[..., Tensor]) -> dict[str, Tensor]:
    values = {
        "linear_qkvr.weight": torch.cat([mine(hf[f"self_attn.{one}_proj.weight"]) for one in "qkvr"]),
        "linear_qkvr.layer_norm_weight": hf["input_layernorm.weight"],
        "linear_proj.weight": mine(hf["self_attn.o_proj.weight"], 1),
        "relative_bias.proj": hf["self_attn.rel_logits_proj.proj"],
        "q_layernorm.weight": hf["self_attn.q_norm.weight"],
        "k_layernorm.weight": hf["self_attn.k_norm.weight"],
        "k_sconv.weight": mine(hf["self_attn.k_sconv.conv1d.weight"]),
        "v_sconv.weight": mine(hf["self_attn.v_sconv.conv1d.weight"]),
    }
    return {f"{name}.{key}": value for key, value in values.items()}


def _dense(hf: Mapping[str, Tensor], mine: Callable[..., Tensor]) -> dict[str, Tensor]:
    return {
        "mlp.linear_fc1.layer_norm_weight": hf["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([mine(hf[f"mlp.{one}_proj.weight"]) for one in ("gate", "up")]),
        "mlp.linear_fc2.weight": mine(hf["mlp.down_proj.weight"], 1),
        "mlp.global_scale": hf["mlp.global_scale"],
    }


def _sparse(hf: Mapping[str, Tensor], config: Mapping[str, Any], mine: Callable[..., Tensor]) -> dict[str, Tensor]:
    group: Any = ps.get_expert_tensor_parallel_group()
    etp, rank = group.size(), group.rank()
    here = config["n_routed_experts"] // ps.get_expert_model_parallel_world_size()
    first = here * ps.get_expert_model_parallel_rank()
    shared = {one: hf[f"mlp.shared_experts.{one}_proj"] for one in ("gate", "up", "down")}
    side_by_side = torch.cat(list(shared["down"]), dim=1)
    values = {
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf["mlp.gate.weight"],
        "mlp.router.global_scale": hf["mlp.gate.global_scale"],
        "mlp.router.expert_bias": hf.get("mlp.gate.e_score_correction_bias", torch.zeros(config["n_routed_experts"])),
        "mlp.shared_experts.linear_fc1.weight": torch.cat([mine(shared[one].flatten(0, 1)) for one in ("gate", "up")]),
        "mlp.shared_experts.linear_fc2.weight": mine(side_by_side, 1),
    }
    for index in range(here):
        gate, up = hf["mlp.experts.gate_up_proj"][first + index].chunk(2)
        down = hf["mlp.experts.down_proj"][first + index]
        values[f"mlp.experts.linear_fc1.weight{index}"] = torch.cat([part.chunk(etp)[rank] for part in (gate, up)])
        values[f"mlp.experts.linear_fc2.weight{index}"] = down.chunk(etp, dim=1)[rank]
    return values
