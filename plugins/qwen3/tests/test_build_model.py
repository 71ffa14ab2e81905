"""What the Qwen3 builder refuses, and the fields it takes from configs of both transformers generations."""

from typing import Any

import pytest
import torch

from lora_plugin_qwen3.model import build_model
from lora_plugins_sdk import LoraError, ParallelRun, RunFacts
from lora_plugins_sdk.testing import Layout, current_run, run_world

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor: is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "rope_type = 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_variants_that_are_not_built(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG | change, ParallelRun.single())


def test_all_problems_are_shown_together() -> None:
    run = ParallelRun(facts=RunFacts(tp=4, pp=2))
    with pytest.raises(LoraError) as error:
        build_model(CONFIG | {"attention_bias": True, "num_hidden_layers": 3}, run)
    assert [one.subject for one in error.value.diagnostics] == [
        "attention_bias = True",
        "num_key_value_heads = 2",
        "num_hidden_layers = 3",
    ]
    assert "use a tensor parallel size that divides 2" in str(error.value)


def test_experts_are_not_spread_where_there_are_none() -> None:
    run = ParallelRun(facts=RunFacts(dp=2, ep=2))
    with pytest.raises(LoraError, match="expert parallel size 2: has no effect on a model without routed experts"):
        build_model(CONFIG, run)


def _built() -> dict[str, Any]:
    model = build_model(CONFIG, current_run(), dtype=torch.bfloat16, overrides={"variable_seq_lengths": True})
    norms = [module for module in model.modules() if hasattr(module, "eps")]
    return {
        "dtypes": {weight.dtype for weight in model.parameters()},
        "eps": {norm.eps for norm in norms},
        "norms": len(norms),
        "inverse_frequencies": model.rotary_pos_emb.inv_freq,
        "variable": model.config.variable_seq_lengths,
        "tied": model.output_layer.weight is None,
    }


@pytest.mark.world
def test_fields_of_the_config_arrive() -> None:
    (built,) = run_world(_built, Layout())
    assert built["dtypes"] == {torch.bfloat16}
    assert built["eps"] == {1e-3} and built["norms"] == 2 * 4 + 1
    torch.testing.assert_close(built["inverse_frequencies"], 1e6 ** (-torch.arange(0, 6, 2) / 6))
    assert built["variable"] is True and built["tied"]
