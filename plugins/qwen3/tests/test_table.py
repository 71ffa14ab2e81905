"""Qwen3's parameter table under two layouts, as it is agreed between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from qwen3_tiny import CONFIG

from lora_plugins_sdk import LoraConfig, LoraError, RunFacts, derive_table, load_plugin

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion


PLUGIN = load_plugin(architecture="qwen3")
ONE_LAYER = CONFIG | {"num_hidden_layers": 1}


@pytest.mark.parametrize("facts", [RunFacts(), RunFacts(tp=2, sequence_parallel=True)], ids=["tp1", "tp2+sp"])
def test_every_column(facts: RunFacts, snapshot: SnapshotAssertion) -> None:
    table = derive_table(PLUGIN, ONE_LAYER, LoraConfig(rank=8, target_modules=("all-linear", "lm_head")), facts)
    assert [
        f"{row.hf_name} {list(row.full_shape)} local {list(row.local_shape)} split {row.partition_dim} "
        f"sum {row.grad_sum_group} in {row.host_module}.lora.{row.param}[{row.stacked_at}:] {row.dtype} "
        f"key {row.init_key} expert {row.expert} {dict(row.serving_names)}"
        for row in table.rows
    ] == snapshot


def test_layers_repeat() -> None:
    one = derive_table(PLUGIN, ONE_LAYER, LoraConfig(rank=8), RunFacts())
    four = derive_table(PLUGIN, CONFIG, LoraConfig(rank=8), RunFacts())
    assert [row.hf_name for row in four.rows] == [
        row.hf_name.replace("layers.0", f"layers.{layer}") for layer in range(4) for row in one.rows
    ]


@pytest.mark.parametrize(
    ("facts", "rank", "message"),
    [
        (RunFacts(tp=4), 8, "tensor parallel size 4: does not divide the 2 key/value heads"),
        (RunFacts(pp=3), 8, "pipeline parallel size 3: does not divide the model's 4 layers"),
        (RunFacts(), 33, "cannot adapt model.layers.0.self_attn.k_proj"),
    ],
)
def test_runs_that_are_refused(facts: RunFacts, rank: int, message: str) -> None:
    with pytest.raises(LoraError, match=message):
        derive_table(PLUGIN, CONFIG, LoraConfig(rank=rank), facts)


def test_a_config_of_another_model_type_is_refused() -> None:
    with pytest.raises(LoraError, match="model_type 'llama': architecture 'qwen3' serves qwen3"):
        derive_table(PLUGIN, CONFIG | {"model_type": "llama"}, LoraConfig(rank=8), RunFacts())
