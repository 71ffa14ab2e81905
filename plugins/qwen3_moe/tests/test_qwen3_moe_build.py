"""What the Qwen3-MoE builder takes and refuses, and that no tensor of a checkpoint is passed over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_moe_tiny import CONFIG, hf_model, save_tensors

from lora_plugin_qwen3_moe.architecture import LAYERS
from lora_plugin_qwen3_moe.model import build_model
from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    ParallelRun,
    RunFacts,
    derive_table,
    load_base_weights,
    load_plugin,
    read_hf_config,
)
from lora_plugins_sdk.testing import Layout, current_run, run_world

PLUGIN = load_plugin(architecture="qwen3_moe")
D, S = LAYERS.types


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"output_router_logits": True}, "output_router_logits = True"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}, "rope_type = 'linear'"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers': is no list of numbers from 0 to 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0: is no number of layers"),
        ({"num_experts": 0}, "num_experts_per_tok = 3: cannot be chosen of 0 experts"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob with num_experts_per_tok = 1"),
        ({"num_local_experts": 4}, "'num_experts' and 'num_local_experts': name the same and say 8 and 4"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
    ],
)
def test_variants_that_are_not_built(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG | change, ParallelRun.single())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (RunFacts(tp=4, etp=1, sequence_parallel=True), "num_key_value_heads = 2"),
        (RunFacts(tp=8, etp=1, sequence_parallel=True), "intermediate_size = 44"),
        (RunFacts(dp=3, ep=3), "num_experts = 8"),
        (RunFacts(dp=8, etp=8), "moe_intermediate_size = 20"),
        (RunFacts(pp=3), "num_hidden_layers = 4"),
    ],
)
def test_runs_that_are_refused(facts: RunFacts, words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG, ParallelRun(facts=facts))


def test_overrides_that_would_change_the_policy() -> None:
    for name, value in (("moe_aux_loss_coeff", 1e-3), ("moe_expert_capacity_factor", 1.0)):
        with pytest.raises(LoraError, match=f"override '{name}'.*which the rollout engine does not|reward does not"):
            build_model(CONFIG, ParallelRun.single(), overrides={name: value})


def test_no_table_where_tensor_parallel_ranks_would_dispatch_the_same_tokens() -> None:
    with pytest.raises(LoraError, match="sequence"):
        derive_table(PLUGIN, CONFIG, LoraConfig(rank=4), RunFacts(tp=2))


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, [S, S, S, S]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, [D, S, D, S]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [D, D, D, S]),
        ({"mlp_only_layers": [1], "layer_types": ["full_attention"] * 4}, [S, D, S, S]),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], kinds: list[str]) -> None:
    """As transformers' Qwen3MoeDecoderLayer has it."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = CONFIG | change
    given = {key: value for key, value in config.items() if value is not None and key != "layer_types"}
    with torch.device("meta"):
        layers: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**given)).model.layers
    assert [S if hasattr(layer.mlp, "experts") else D for layer in layers] == kinds
    assert LAYERS.resolve(PLUGIN.architecture.dims(config), 4) == kinds


def _built(config: dict[str, Any]) -> dict[str, Any]:
    model: Any = build_model(config, current_run(), dtype=torch.bfloat16)
    return {
        "dtypes": {weight.dtype for weight in model.parameters()},
        "sparse": [hasattr(layer.mlp, "router") for layer in model.decoder.layers],
        "pre_softmax": model.config.moe_router_pre_softmax,
        "heads": model.config.kv_channels,
        "inverse_frequencies": model.rotary_pos_emb.inv_freq,
        "tied": model.output_layer.weight is None,
    }


@pytest.mark.world
def test_fields_of_the_config_arrive() -> None:
    rope = {"rope_theta": 1e6, "rope_parameters": None}
    usual = CONFIG | rope | {"num_local_experts": 8}
    other = CONFIG | rope | {"norm_topk_prob": False, "tie_word_embeddings": True, "head_dim": None}
    (found,) = run_world(_built, Layout(), usual)
    assert found["dtypes"] == {torch.bfloat16} and found["sparse"] == [False, True, True, False]
    assert not found["pre_softmax"] and found["heads"] == 12 and not found["tied"]
    torch.testing.assert_close(found["inverse_frequencies"], 1e6 ** (-torch.arange(0, 12, 2) / 12))
    (found,) = run_world(_built, Layout(), other)
    assert found["pre_softmax"] and found["heads"] == 36 // 4 and found["tied"]


def _refusal(directory: Path) -> str:
    run = current_run()
    model = PLUGIN.build_model(read_hf_config(directory), run, torch.float32)
    try:
        load_base_weights(model, PLUGIN, directory, run)
    except LoraError as error:
        return str(error)
    return ""


@pytest.mark.world
@pytest.mark.parametrize(
    ("name", "add", "words"),
    [
        ("model.layers.0.mlp.up_proj.weight", False, "layers.0.mlp.up_proj.weight: is missing"),
        ("model.layers.1.mlp.gate.weight", False, "layers.1.mlp.gate.weight: is missing"),
        ("model.layers.2.mlp.experts.down_proj", False, "mlp.experts.0.down_proj.weight: is missing"),
        ("model.layers.3.mlp.gate.weight", True, "layers.3.mlp.gate.weight: is in the checkpoint and has no"),
    ],
)
def test_every_tensor_is_accounted_for(name: str, add: bool, words: str, checkpoint: Path, tmp_path: Path) -> None:
    """Experts fused, as transformers holds them in memory."""
    tensors = dict(hf_model(checkpoint).state_dict())
    if add:
        tensors[name] = torch.zeros(2)
    else:
        del tensors[name]
    (message,) = run_world(_refusal, Layout(), save_tensors(tmp_path / "spoiled", CONFIG, tensors))
    assert words in message
