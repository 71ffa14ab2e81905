"""What the builders refuse: fields, sizes, overrides and world sizes."""

import pytest
import torch

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.hf_fields import unsupported_fields
from lora_plugins_sdk.hosts.sizes import (
    dense_size_problems,
    hybrid_size_problems,
    moe_size_fields,
    moe_size_problems,
    padded_vocab_size,
)
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.run import RunFacts

SIZES = {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 18, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("vocab", "tp", "divisible_by", "padded"),
    [
        (300, 1, 1, 300),
        (300, 2, 1, 300),
        (301, 2, 1, 302),
        (5, 4, 1, 8),
        (300, 1, 128, 384),
        (151936, 1, 128, 151936),
        (151936, 2, 128, 152064),
    ],
)
def test_vocabulary_is_padded_as_megatron_lm_does(vocab: int, tp: int, divisible_by: int, padded: int) -> None:
    assert padded_vocab_size(vocab, RunFacts(tp=tp, make_vocab_size_divisible_by=divisible_by)) == padded


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


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (RunFacts(tp=3, dp=2, ep=2, etp=3), []),
        (RunFacts(tp=6, etp=1), ["num_key_value_heads = 3"]),
        (RunFacts(dp=4, ep=4), ["num_experts = 6"]),
        (RunFacts(dp=2, etp=2), ["moe_intermediate_size = 9"]),
        (RunFacts(pp=5), ["num_hidden_layers"]),
    ],
)
def test_sizes_of_a_model_with_experts_alone(facts: RunFacts, wrong: list[str]) -> None:
    """A model without delta nets and shared experts, whose keys its config lacks."""
    others = ("linear_", "shared_expert")
    dims = ModelDims({name: size for name, size in HYBRID.items() if not name.startswith(others)})
    problems = moe_size_problems(facts, dims)
    assert len(problems) == len(wrong)
    assert all(one.subject.startswith(start) for one, start in zip(problems, wrong, strict=True))
    more = {"hidden_size": 24, "head_dim": 2, "num_experts_per_tok": 5}
    fields = moe_size_fields(ModelDims({**dims.config, **more}))
    assert fields["num_moe_experts"] == 6 and fields["moe_ffn_hidden_size"] == 9 and fields["moe_router_topk"] == 5


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_fields_of_rotary_positions_are_found_where_transformers_keeps_them(key: str) -> None:
    config = {key: {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}}
    problems = unsupported_fields(config, {"rope_type": "default", "partial_rotary_factor": 1.0})
    assert [one.subject for one in problems] == ["rope_type = 'linear'", "partial_rotary_factor = 0.5"]
    assert unsupported_fields({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0})
    assert not unsupported_fields({key: None, "partial_rotary_factor": None}, {"partial_rotary_factor": 1.0})


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
