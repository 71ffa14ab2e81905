"""What the hybrid's builder takes and refuses."""

from typing import Any

import pytest
import torch
from hybrid_tiny import CONFIG

from lora_plugin_qwen36_moe.model import build_model
from lora_plugins_sdk import LoraConfig, LoraError, ParallelRun, RunFacts, attach, derive_table, load_plugin
from lora_plugins_sdk.testing import Layout, current_run, run_world

PLUGIN = load_plugin(architecture="qwen36_moe")
WRAPPED = {"model_type": "qwen3_5_moe", "text_config": CONFIG, "vision_config": {"depth": 2}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"output_router_logits": True}, "output_router_logits = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.2}}, "rotates 3 of a head's 16 elements"),
        ({"rope_parameters": None, "rope_scaling": {"partial_rotary_factor": 0.2}}, "rotates 3 of a head's 16"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "no list of 4 types"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_variants_that_are_not_built(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG | change, ParallelRun.single())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("moe_shared_expert_overlap", True, "summed once per rank"),
        ("moe_aux_loss_coeff", 1e-3, "loss to the router's gradient that the reward does not contain"),
        ("moe_z_loss_coeff", 1e-3, "loss to the router's gradient that the reward does not contain"),
        ("moe_router_load_balancing_type", "aux_loss", "loss to the router's gradient"),
        ("moe_expert_capacity_factor", 1.0, "drops tokens"),
        ("moe_input_jitter_eps", 0.1, "noise before the router"),
        ("moe_router_topk", 3, "follows from the run, the dtype and the model"),
    ],
)
def test_overrides_that_would_change_the_policy(name: str, value: Any, words: str) -> None:
    """B8: with the shared expert's overlap its linears no longer sum over TP, and the delta would be doubled."""
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG, ParallelRun.single(), overrides={name: value})


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (RunFacts(cp=2), "context parallel size 2"),
        (RunFacts(tp=4, etp=1, sequence_parallel=True), "num_key_value_heads = 2"),
        (RunFacts(dp=3, ep=3), "num_experts = 8"),
        (RunFacts(dp=8, etp=8), "moe_intermediate_size = 20"),
    ],
)
def test_runs_that_are_refused(facts: RunFacts, words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG, ParallelRun(facts=facts))


@pytest.mark.parametrize(("facts", "words"), [(RunFacts(cp=2), "carries a state"), (RunFacts(tp=2), "sequence")])
def test_no_table_of_a_run_that_cannot_train(facts: RunFacts, words: str) -> None:
    with pytest.raises(LoraError, match=words):
        derive_table(PLUGIN, CONFIG, LoraConfig(rank=4), facts)


def _attach_to_overlap() -> str:
    from lora_plugins_sdk.hosts import experts

    experts._NOT_THE_POLICY.clear()
    run = current_run()
    model = build_model(CONFIG, run, overrides={"moe_shared_expert_overlap": True})
    try:
        attach(model, PLUGIN, CONFIG, LoraConfig(rank=4), run)
    except LoraError as error:
        return str(error)
    return ""


@pytest.mark.world
def test_a_host_with_shared_expert_overlap_takes_no_adapter() -> None:
    """B8: whoever built it."""
    for message in run_world(_attach_to_overlap, Layout(tp=2, etp=1, sequence_parallel=True)):
        assert "mlp.shared_experts.linear_fc" in message and "without moe_shared_expert_overlap" in message


def _built(config: dict[str, Any]) -> dict[str, Any]:
    model: Any = build_model(config, current_run(), dtype=torch.bfloat16)
    return {
        "dtypes": {weight.dtype for weight in model.parameters()},
        "kinds": [type(layer.self_attention).__name__ for layer in model.decoder.layers],
        "inverse_frequencies": model.rotary_pos_emb.inv_freq,
        "aux_loss": any(layer.mlp.router.is_aux_loss_enabled() for layer in model.decoder.layers),
    }


@pytest.mark.world
@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "vision-language"])
def test_fields_of_the_config_arrive(wrapped: bool) -> None:
    """Also without a list of layers: every fourth has full attention."""
    every_fourth = {key: value for key, value in CONFIG.items() if key != "layer_types"} | {"num_hidden_layers": 8}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    text = every_fourth | {"rope_parameters": rope}
    (built,) = run_world(_built, Layout(), WRAPPED | {"text_config": text} if wrapped else text)
    assert built["dtypes"] == {torch.bfloat16}
    assert [kind == "SelfAttention" for kind in built["kinds"]] == [False, False, False, True] * 2
    torch.testing.assert_close(built["inverse_frequencies"], 1e6 ** (-torch.arange(0, 4, 2) / 4))
    assert not built["aux_loss"]
