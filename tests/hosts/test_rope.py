"""Rotary positions read from configs of both transformers generations, and their frequencies against transformers'."""

from typing import Any

import pytest
import torch

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.hosts.rope import Llama3Scaling, Rope, YarnScaling, read_rope, rope_problems
from lora_plugins_sdk.hosts.rope_frequencies import inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = LLAMA3 | {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

# Values of published checkpoints, and each optional field.
SCALED: dict[str, dict[str, Any]] = {
    "llama 3.1": LLAMA31,
    "llama 3.2": LLAMA31 | {"factor": 32.0},
    "llama3, other bounds": LLAMA31 | {"low_freq_factor": 0.5, "high_freq_factor": 9.0},
    "llama3, length of the config": LLAMA3,
    "qwen yarn": YARN,
    "yarn, length of the config": {"rope_type": "yarn", "factor": 4.0},
    "yarn, attention_factor": YARN | {"attention_factor": 1.7},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.3},
    "yarn, mscale alone": YARN | {"mscale": 0.707, "mscale_all_dim": 0.0},
    "yarn, betas": YARN | {"beta_fast": 20.0, "beta_slow": 3},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn that scales nothing": YARN | {"factor": 1.0},
    "yarn, one pair at both bounds": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_and_factor_are_those_of_transformers(name: str, place: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: dict[str, Any] = SCALED[name] | ({"rope_theta": 5e5} if place == "rope_parameters" else {})
    config: dict[str, Any] = {"rope_theta": 5e5, "max_position_embeddings": 65536, place: rope}
    read = read_rope(config)
    theirs: Any = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, **config)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(read, 128), frequencies, rtol=3e-7, atol=0)
    assert getattr(read.scaling, "attention_factor", 1.0) == pytest.approx(factor, rel=1e-12)


def test_a_scaling_changes_slow_pairs_and_leaves_fast_ones() -> None:
    plain = inverse_frequencies(Rope(theta=5e5), 128)
    for name in ("llama 3.1", "qwen yarn"):
        ratio = plain / inverse_frequencies(read_rope({"rope_theta": 5e5, "rope_scaling": SCALED[name]}), 128)
        assert ratio[0] == 1 and ratio[-1] == SCALED[name]["factor"] and ((ratio > 1.1) & (ratio < 3)).any(), name


@pytest.mark.parametrize(
    ("config", "theta", "kind"),
    [
        ({}, 10000.0, type(None)),
        ({"rope_theta": 1e6}, 1e6, type(None)),
        ({"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": None}, 1e6, type(None)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 8},
            1e6,
            YarnScaling,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, type(None)),
        ({"rope_parameters": LLAMA31 | {"rope_theta": 5e5}, "rope_theta": 1.5}, 5e5, Llama3Scaling),
        ({"rope_scaling": LLAMA31, "rope_parameters": LLAMA31, "rope_theta": 5e5}, 5e5, Llama3Scaling),
    ],
)
def test_configs_of_both_transformers_generations(config: dict[str, Any], theta: float, kind: type) -> None:
    rope = read_rope(config)
    assert rope.theta == theta and isinstance(rope.scaling, kind)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (
            {"rope_type": "linear", "factor": 2.0},
            "rope_type = 'linear': is not built; there is 'default', 'llama3', 'yarn'",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic': is not built"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type = 'longrope': is not built"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type = 'su': is not built"),
        ({"type": "mrope", "mrope_section": [1, 1, 1]}, "rope_type = 'mrope': is not built"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope_type = 'proportional': is not built"),
        ({"rope_type": ["yarn"]}, r"rope_type = \['yarn'\]: is not built"),
        ({"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}, "rope_type = {'full_attention': 'yarn', "),
        ({"factor": 8.0}, "factor = 8.0: has no effect with rope_type = 'default'"),
        (LLAMA31 | {"beta_fast": 32}, "beta_fast = 32: has no effect with rope_type = 'llama3'"),
        (YARN | {"attn_factor": 1.0}, "attn_factor = 1.0: has no effect with rope_type = 'yarn'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor: is missing"),
        ({"rope_type": "yarn"}, "factor: is missing, and rope_type = 'yarn' needs it"),
        (LLAMA31 | {"high_freq_factor": 1.0}, "high_freq_factor = 1.0: is not above low_freq_factor"),
        (YARN | {"beta_slow": 64}, "beta_fast = None: is below beta_slow"),
        (YARN | {"factor": "4"}, "factor = '4': is no number above 0"),
        (LLAMA31 | {"factor": -8.0}, "factor = -8.0: is no number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan: is no number above 0"),
        (YARN | {"rope_theta": 1.0}, "rope_theta = 1.0: is not above 1"),
    ],
)
def test_what_is_not_built_is_refused_by_name(rope: dict[str, Any], words: str) -> None:
    config = {"max_position_embeddings": 64, "rope_parameters": rope}
    with pytest.raises(LoraError, match=words):
        read_rope(config)
    assert all(one.cure for one in rope_problems(config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": LLAMA31, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_type"),
        # What becomes of a config of transformers 5 when a model card's `rope_scaling` is pasted into it.
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 1e6}}, "rope_theta"),
        ({"rope_scaling": YARN, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_two_places_that_say_different_things(config: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=rf"rope_scaling and rope_parameters: say different things \(.*{words}"):
        read_rope({"max_position_embeddings": 64} | config)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_fields_that_are_no_mapping(key: str) -> None:
    with pytest.raises(LoraError, match=rf"{key} = 'yarn': is no mapping"):
        rope_problems({key: "yarn"})


def test_yarn_scales_the_scores_of_whole_heads_only() -> None:
    with pytest.raises(LoraError, match=r"scales whole heads here, and 0\.25 of each is rotated"):
        read_rope({"rope_scaling": YARN}, percent=0.25)
    assert read_rope({"rope_scaling": YARN | {"attention_factor": 1.0}}, percent=0.25).percent == 0.25
