"""What the builders refuse: fields, sizes, overrides and world sizes."""

from typing import Any

import pytest
import torch

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.hf_fields import rope_theta, unsupported_fields
from lora_plugins_sdk.hosts.sizes import dense_size_problems, hybrid_size_problems, padded_vocab_size
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.run import RunFacts

SIZES = {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 18, "num_hidden_layers": 4}


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(300, 1, 300), (300, 2, 300), (301, 2, 302), (5, 4, 8)])
def test_vocabulary_is_padded_to_a_multiple_of_tp(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp) == padded


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (RunFacts(), []),
        (RunFacts(tp=3, pp=2), []),
        (RunFacts(tp=2), ["num_key_value_heads = 3"]),
        (RunFacts(tp=4), ["num_key_value_heads = 3", "intermediate_size = 18"]),
        (RunFacts(pp=3), ["num_hidden_layers = 4"]),
        (RunFacts(tp=9), ["num_attention_heads = 12", "num_key_value_heads = 3"]),
    ],
)
def test_every_indivisible_size_is_named(facts: RunFacts, wrong: list[str]) -> None:
    problems = dense_size_problems(facts, ModelDims(SIZES))
    assert [one.subject for one in problems] == wrong
    assert all("parallel size that divides" in one.cure for one in problems)


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (RunFacts(dp=2, ep=2), ["expert parallel size 2"]),
        (RunFacts(tp=3, etp=1), ["expert tensor parallel size 1"]),
        (RunFacts(tp=3, dp=2, ep=2, etp=1), ["expert parallel size 2", "expert tensor parallel size 1"]),
    ],
)
def test_sizes_of_experts_on_a_model_without_them(facts: RunFacts, wrong: list[str]) -> None:
    problems = dense_size_problems(facts, ModelDims(SIZES))
    assert [one.subject for one in problems] == wrong
    assert all("without routed experts" in one.reason for one in problems)


HYBRID = SIZES | {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "shared_expert_intermediate_size": 15,
    "num_experts": 6,
    "moe_intermediate_size": 9,
}


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (RunFacts(tp=3, dp=2, ep=2), []),
        (RunFacts(tp=6, etp=1), ["num_key_value_heads = 3", "linear_num_key_heads = 3", "shared_expert"]),
        (RunFacts(tp=9, etp=1), ["num_att", "num_key", "linear_num_key", "linear_num_value", "shared_expert"]),
        (RunFacts(dp=4, ep=4), ["num_experts = 6"]),
        (RunFacts(dp=2, etp=2), ["moe_intermediate_size = 9"]),
    ],
)
def test_sizes_of_a_hybrid_follow_their_own_ranks(facts: RunFacts, wrong: list[str]) -> None:
    problems = hybrid_size_problems(facts, ModelDims(HYBRID))
    assert len(problems) == len(wrong)
    assert all(one.subject.startswith(start) for one, start in zip(problems, wrong, strict=True))


ROPE = [
    ({}, 10000.0, "default"),
    ({"rope_theta": 1e6}, 1e6, "default"),
    ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, "default"),
    ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 1e6, "yarn"),
    ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1e6, "linear"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, "default"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}}, 5e5, "yarn"),
]


@pytest.mark.parametrize(("config", "theta", "kind"), ROPE)
def test_rope_of_both_transformers_generations(config: dict[str, Any], theta: float, kind: str) -> None:
    assert rope_theta(config) == theta
    problems = unsupported_fields(config, {"rope_type": "default"})
    assert [one.subject for one in problems] == ([] if kind == "default" else [f"rope_type = {kind!r}"])


def test_a_field_with_another_value_is_named_and_an_absent_one_is_fine() -> None:
    built = {"attention_bias": False, "hidden_act": "silu"}
    assert unsupported_fields({}, built) == []
    (problem,) = unsupported_fields({"attention_bias": True, "hidden_act": "silu"}, built)
    assert problem.subject == "attention_bias = True" and "False" in problem.reason


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("recompute_granularty", "use recompute_granularity"),
        ("tensor_model_parallel_size", "follows from the run"),
        ("hidden_size", "follows from the run, the dtype and the model"),
    ],
)
def test_overrides_that_cannot_be_applied(override: str, words: str) -> None:
    from lora_plugins_sdk.hosts.gpt import transformer_config

    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(LoraError, match=words) as error:
        transformer_config(ParallelRun.single(), dtype=torch.float32, model=model, overrides={override: 1})
    assert override in str(error.value)
