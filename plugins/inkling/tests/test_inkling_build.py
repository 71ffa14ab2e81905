"""What the Inkling builder refuses, and the fields that arrive."""

from typing import Any

import pytest
import torch
from inkling_tiny import CONFIG

from lora_plugin_inkling.model.build import build_model
from lora_plugins_sdk import LoraError, ParallelRun, RunFacts, load_plugin
from lora_plugins_sdk.testing import Layout, current_run, run_world


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared_expert_sink": False}, "shared_expert_sink = False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"use_sconv": False}, "use_sconv = False"),
        ({"gate_activation": "softmax"}, "gate_activation = 'softmax'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"layer_types": ["hybrid"] * 3}, "'layer_types': is no list of 4 types"),
        ({"layer_types": None}, "'layer_types': is missing, and there is no 'local_layer_ids' either"),
        ({"mlp_layer_types": ["dense", "sparse", "mixed", "sparse"]}, "'mlp_layer_types': names layers of type mixed"),
        ({"d_rel": None}, "d_rel"),
        (
            {"model_type": "inkling2_text"},
            "model_type 'inkling2_text': it is another architecture: attention residuals",
        ),
    ],
)
def test_variants_that_are_not_built(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG | change, ParallelRun.single())


@pytest.mark.parametrize("model_type", ["inkling2", "inkling2_text", "inkling2_loop"])
def test_inkling_2_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(
        LoraError, match=f"model type '{model_type}': is not served by inkling: it is another architect"
    ):
        load_plugin(model_type)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            RunFacts(tp=4, sequence_parallel=True),
            "num_key_value_heads = 2: not divisible by the tensor",
        ),
        (RunFacts(dp=3, ep=3), "n_routed_experts = 8: not divisible by the expert parallel size 3"),
        (RunFacts(pp=3), "num_hidden_layers = 4: not divisible by the pipeline parallel size 3"),
        (RunFacts(cp=2), "context parallel size 2: a short convolution needs the tokens before its own"),
        (RunFacts(tp=2), "tensor parallel size 2 without sequence parallelism: every rank would dispatch"),
    ],
)
def test_runs_that_are_refused(facts: RunFacts, words: str) -> None:
    """I3: among them TP without sequence parallelism, where a branch would have to complete its input's gradient."""
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG, ParallelRun(facts=facts))


@pytest.mark.parametrize(
    "overrides",
    [
        {"recompute_modules": ["moe"]},
        {"moe_shared_expert_overlap": True},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_aux_loss_coeff": 0.1},
        {"qk_layernorm": True},
    ],
    ids=str,
)
def test_overrides_that_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(LoraError, match=f"override '{next(iter(overrides))}'"):
        build_model(CONFIG, ParallelRun.single(), overrides=overrides)


def _built(config: dict[str, Any]) -> dict[str, Any]:
    model: Any = build_model(config, current_run(), dtype=torch.bfloat16)
    layers = model.decoder.layers
    attention = [layer.get_submodule(layer.attention_name) for layer in layers]
    return {
        "dtypes": {weight.dtype for weight in model.parameters()},
        "attention": [layer.attention_name for layer in layers],
        "window": [one.fields.window for one in attention],
        "extent": [one.relative_bias.proj.shape[1] for one in attention],
        "outputs": model.output_layer.weight.shape[0],
        "width": model.decoder.final_layernorm.width,
        "eps": {module.eps for module in model.modules() if hasattr(module, "eps")},
    }


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_fields_of_the_config_arrive() -> None:
    (built,) = run_world(_built, Layout(), CONFIG | {"rms_norm_eps": 1e-3})
    assert built["dtypes"] == {torch.bfloat16}
    assert built["attention"] == ["self_attention", "sliding_attention"] * 2
    assert built["window"] == [None, 7] * 2 and built["extent"] == [13, 7] * 2
    assert built["outputs"] == 61 and built["width"] == 3.0 and built["eps"] == {1e-3}


@pytest.mark.world
def test_a_head_without_padding_has_every_row() -> None:
    (built,) = run_world(_built, Layout(), {key: value for key, value in CONFIG.items() if "unpadded" not in key})
    assert built["outputs"] == 64
