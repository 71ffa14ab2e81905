"""A published config.json and transformers' own say the same; one that says two things is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inkling_tiny import CONFIG, PUBLISHED_CONFIG, PUBLISHED_TEXT, in_transformers_words, make_model, tokens
from safetensors.torch import save_file
from torch import Tensor

from lora_plugin_inkling import ARCHITECTURE
from lora_plugin_inkling.model.build import build_model
from lora_plugin_inkling.model.fields import read_fields
from lora_plugin_inkling.model.published import to_published
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

WEIGHTS = "model.safetensors"

LORA = LoraConfig(rank=4, target_modules=("all-linear", "lm_head"))


def _rows(config: dict[str, Any]) -> list[tuple[Any, ...]]:
    table = derive_table(load_plugin(architecture="inkling"), config, LORA, RunFacts(tp=2, sequence_parallel=True))
    return [(row.host_module, row.factor, row.full_shape, row.local_shape) for row in table.rows]


def test_a_published_config_is_read_as_transformers_reads_it() -> None:
    own = in_transformers_words(PUBLISHED_TEXT)
    assert own["layer_types"] == ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding"]
    assert own["mlp_layer_types"] == ["dense", "dense", "sparse", "sparse"]
    assert (own["intermediate_size"], own["moe_intermediate_size"]) == (36, 28)
    assert read_fields(ARCHITECTURE.dims(PUBLISHED_CONFIG)) == read_fields(ARCHITECTURE.dims(own))
    assert _rows(PUBLISHED_CONFIG) == _rows(own)


def test_a_config_in_both_words_is_read() -> None:
    """As transformers writes it when it has read a published one."""
    both = in_transformers_words(PUBLISHED_TEXT) | {"local_layer_ids": [0, 2, 3], "dense_mlp_idx": 2}
    assert read_fields(ARCHITECTURE.dims(both)) == read_fields(ARCHITECTURE.dims(PUBLISHED_CONFIG))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"local_layer_ids": [1, 2]},
            "config keys 'layer_types' and 'local_layer_ids': contradict each other: layer 2 is hybrid by the first "
            "and hybrid_sliding by the second",
        ),
        (
            {"dense_mlp_idx": 1},
            "config keys 'mlp_layer_types' and 'dense_mlp_idx': contradict each other: layer 3 is dense by the first",
        ),
        ({"sconv_kernel_size": 5}, "config keys 'conv_kernel_size' and 'sconv_kernel_size': name the same and say 4"),
        ({"model_max_length": 32}, "config keys 'max_position_embeddings' and 'model_max_length': name the same"),
        (
            {"dense_intermediate_size": 72},
            "config keys 'moe_intermediate_size' and 'intermediate_size': name the same and say 28 and 36",
        ),
        ({"layer_types": None, "local_layer_ids": [4]}, "'local_layer_ids': is no list of numbers from 0 to 3"),
        ({"mlp_layer_types": None, "dense_mlp_idx": 5}, "'dense_mlp_idx': is no number from 0 to 4"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        build_model(CONFIG | change, ParallelRun.single())
    with pytest.raises(LoraError, match=words):
        _rows(CONFIG | change)


def _epsilons(config: dict[str, Any]) -> set[Any]:
    model = build_model(config, current_run(), dtype=torch.float32)
    return {module.eps for module in model.modules() if hasattr(module, "eps")}


@pytest.mark.world
def test_the_epsilon_of_the_norms_is_the_language_models() -> None:
    (eps,) = run_world(_epsilons, Layout(), PUBLISHED_CONFIG)
    assert eps == {1e-4}


def _logits(directory: Path, ids: Tensor) -> Tensor:
    """Of this rank, from a directory alone."""
    run, plugin, config = current_run(), load_plugin("inkling_mm_model"), read_hf_config(directory)
    model: Any = plugin.build_model(config, run, torch.float32)
    load_base_weights(model, plugin, directory, run)
    with torch.no_grad():
        return model(ids)


@pytest.mark.world
def test_a_published_directory_is_the_model_that_transformers_has(tmp_path: Path) -> None:
    model = make_model(in_transformers_words(PUBLISHED_TEXT))
    save_file({name: one.contiguous() for name, one in to_published(model.state_dict()).items()}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    with torch.no_grad():
        expected = model(tokens()).logits
    shards = run_world(_logits, Layout(tp=2, sequence_parallel=True), tmp_path, tokens())
    logits = torch.cat(shards, dim=-1)[..., : expected.shape[-1]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
