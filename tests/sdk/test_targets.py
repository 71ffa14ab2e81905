"""From what a user asks for to the projections that exist."""

from typing import Any

import pytest
from sdk_toy import ALL_LINEAR, ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import LoraConfig, LoraError
from lora_plugins_sdk.targets import normalize_targets


def picked(config: dict[str, Any] | None = None, **options: Any) -> frozenset[str]:
    return normalize_targets(ARCHITECTURE, HF_CONFIG | (config or {}), LoraConfig(rank=2, **options))


def layers(*leaves: str) -> frozenset[str]:
    return frozenset(f"model.layers.{layer}.{leaf}" for layer in range(2) for leaf in leaves)


QKV = layers("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def test_all_linear_leaves_the_output_head_out() -> None:
    assert picked() == ALL_LINEAR


def test_the_output_head_can_be_asked_for() -> None:
    assert picked(target_modules=("all-linear", "lm_head")) == ALL_LINEAR | {"lm_head"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "v_proj"), layers("self_attn.q_proj", "self_attn.v_proj")),
        (("linear_qkv",), QKV),
        (("linear_fc1", "o_proj"), layers("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj")),
        (("mlp.down_proj",), layers("mlp.down_proj")),
        (("model.layers.1.self_attn.k_proj",), {"model.layers.1.self_attn.k_proj"}),
        (("decoder.layers.0.mlp.linear_fc2",), {"model.layers.0.mlp.down_proj"}),
        (("*.layers.1.*",), {one for one in ALL_LINEAR if ".1." in one}),
        (("decoder.layers.0.self_attention.*",), {one for one in ALL_LINEAR if ".0.self_attn" in one}),
        (("model.layers.?.mlp.[gd]*",), layers("mlp.gate_proj", "mlp.down_proj")),
        (("output_layer",), {"lm_head"}),
    ],
)
def test_vocabulary(targets: tuple[str, ...], expected: frozenset[str] | set[str]) -> None:
    assert picked(target_modules=targets) == expected


def test_one_target_may_be_a_plain_string() -> None:
    assert picked(target_modules="q_proj") == layers("self_attn.q_proj")


def test_a_name_is_no_substring() -> None:
    with pytest.raises(LoraError, match="target 'proj': matches no projection"):
        picked(target_modules=("proj",))


@pytest.mark.parametrize(
    ("exclude", "gone"),
    [
        (("linear_qkv",), QKV),
        (("o_proj", "*.layers.1.mlp.*"), {one for one in ALL_LINEAR if "o_proj" in one or ".1.mlp" in one}),
    ],
)
def test_exclusions_use_the_same_vocabulary(exclude: tuple[str, ...], gone: set[str]) -> None:
    assert picked(exclude_modules=exclude) == ALL_LINEAR - gone


def test_scope() -> None:
    assert picked(scope="vision") == {"visual.patch_proj"}
    assert picked(scope="language") == ALL_LINEAR - {"visual.patch_proj"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ("q_porj",)}, "target 'q_porj': matches no projection.*did you mean 'q_proj'"),
        ({"target_modules": ("linear_fc1", "liner_fc2")}, "target 'liner_fc2'.*did you mean 'linear_fc2'"),
        ({"target_modules": ("*.layers.9.*",)}, "target '\\*.layers.9.\\*': matches no projection"),
        ({"exclude_modules": ("router",)}, "exclusion 'router': matches no projection"),
        ({"exclude_modules": ("all-linear",)}, "nothing is left to train"),
        ({"target_modules": ("q_proj",), "scope": "vision"}, "nothing is left to train.*'vision'"),
        ({"target_modules": ("Q_PROJ",)}, "target 'Q_PROJ'"),
    ],
)
def test_a_request_without_effect_is_an_error_that_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoraError, match=message):
        picked(**options)


def test_all_bad_names_are_reported_at_once() -> None:
    with pytest.raises(LoraError) as error:
        picked(target_modules=("q_proj", "nope", "nada"), exclude_modules=("nix",))
    assert [one.subject for one in error.value.diagnostics] == ["target 'nope'", "target 'nada'", "exclusion 'nix'"]


@pytest.mark.parametrize("target", ["lm_head", "output_layer", "*"])
def test_a_tied_head_is_refused(target: str) -> None:
    """B42: an adapter on one user of a shared tensor would not reach the other."""
    with pytest.raises(LoraError, match=r"tie_word_embeddings: the weight is model.embed_tokens.weight itself"):
        picked({"tie_word_embeddings": True}, target_modules=(target,))


def test_tied_embeddings_do_not_hinder_the_other_targets() -> None:
    assert picked({"tie_word_embeddings": True}) == ALL_LINEAR
    assert picked({"tie_word_embeddings": True}, target_modules=("*",), exclude_modules=("lm_head",)) == ALL_LINEAR


def test_a_config_of_another_model_type_is_refused() -> None:
    with pytest.raises(LoraError, match="model_type 'other': architecture 'toy' serves toy"):
        picked({"model_type": "other"})
