"""The torch host has Transformer Engine's module tree under both supported megatron-core versions."""

import sys
import types
from typing import Any

import pytest
import torch
from hybrid_host import build_hybrid

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.hosts.gpt import build_gpt, transformer_config
from lora_plugins_sdk.hosts.rope import Rope
from lora_plugins_sdk.hosts.sizes import dense_size_fields
from lora_plugins_sdk.hosts.torch_backend import TorchSpecProvider, decoder_block_spec, spec_provider
from lora_plugins_sdk.testing import Layout, current_run, run_world

HF = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=11,
    max_position_embeddings=32,
)


def _shapes() -> tuple[dict[str, tuple[int, ...]], set[str], bool]:
    from megatron.core.models.gpt import gpt_layer_specs

    run, dims = current_run(), ModelDims(HF)
    model = dense_size_fields(dims) | dict(
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    config = transformer_config(run, dtype=torch.float32, model=model, overrides={})
    names = ("TESpecProvider", "TENorm")
    before = [vars(gpt_layer_specs).get(name, "absent") for name in names]
    decoder_block_spec(config)
    restored = before == [vars(gpt_layer_specs).get(name, "absent") for name in names]
    gpt = build_gpt(config, run, dims, rope=Rope(theta=10000.0))
    split = {name for name, weight in gpt.named_parameters() if getattr(weight, "tensor_model_parallel", False)}
    return {name: tuple(weight.shape) for name, weight in gpt.named_parameters()}, split, restored


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_parameter_names_and_local_shapes_are_transformer_engines() -> None:
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (16,),
        "self_attention.linear_qkv.weight": (24, 16),  # half of (4 + 2 * 2) heads of 6
        "self_attention.q_layernorm.weight": (6,),
        "self_attention.k_layernorm.weight": (6,),
        "self_attention.linear_proj.weight": (16, 12),
        "mlp.linear_fc1.layer_norm_weight": (16,),
        "mlp.linear_fc1.weight": (24, 16),
        "mlp.linear_fc2.weight": (16, 12),
    }
    expected = {
        "embedding.word_embeddings.weight": (6, 16),  # 11 tokens padded to 12
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (6, 16),
    } | {f"decoder.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    for shapes, split, restored in run_world(_shapes, Layout(tp=2)):
        assert shapes == expected
        assert split == {name for name in expected if "norm" not in name}
        assert restored, "megatron-core's own names were not put back"


def test_transformer_engine_is_taken_where_it_is_installed_and_cuda_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert spec_provider() is TorchSpecProvider
    provider: Any = types.ModuleType("provider")
    provider.TESpecProvider = object()
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine_spec_provider", provider)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "transformer_engine" or None)
    assert spec_provider() is TorchSpecProvider  # installed, but no CUDA
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert spec_provider() is provider.TESpecProvider
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert spec_provider() is TorchSpecProvider


def _hybrid_shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in build_hybrid().named_parameters()}


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_names_and_shapes_of_delta_nets_and_experts_are_transformer_engines() -> None:
    mlp = {
        "pre_mlp_layernorm.weight": (16,),
        "mlp.router.weight": (4, 16),
        "mlp.experts.linear_fc1.weight0": (24, 16),  # two of four experts, whole: expert TP is 1
        "mlp.experts.linear_fc1.weight1": (24, 16),
        "mlp.experts.linear_fc2.weight0": (16, 12),
        "mlp.experts.linear_fc2.weight1": (16, 12),
        "mlp.shared_experts.gate_weight": (1, 16),
        "mlp.shared_experts.linear_fc1.weight": (20, 16),
        "mlp.shared_experts.linear_fc2.weight": (16, 10),
    }
    delta_net = {
        "self_attention.in_proj.layer_norm_weight": (16,),
        "self_attention.in_proj.weight": ((12 + 12 + 40 + 40 + 4 + 4) // 2, 16),  # q, k, v, z, b, a
        "self_attention.conv1d.weight": (32, 1, 4),
        "self_attention.A_log": (2,),
        "self_attention.dt_bias": (2,),
        "self_attention.out_norm.weight": (10,),
        "self_attention.out_proj.weight": (16, 20),
    }
    attention = {
        "self_attention.linear_qkv.layer_norm_weight": (16,),
        "self_attention.linear_qkv.weight": (48, 16),  # half of 4 queries, 4 gates, 2 keys, 2 values of 8
        "self_attention.q_layernorm.weight": (8,),
        "self_attention.k_layernorm.weight": (8,),
        "self_attention.linear_proj.weight": (16, 16),
    }
    expected = {
        "embedding.word_embeddings.weight": (6, 16),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (6, 16),
    }
    for layer, parts in enumerate((delta_net, attention)):
        expected |= {f"decoder.layers.{layer}.{name}": shape for name, shape in (parts | mlp).items()}
    for shapes in run_world(_hybrid_shapes, Layout(tp=2, ep=2, etp=1, sequence_parallel=True)):
        assert shapes == expected
