"""Exports and imports under every topology, bit for bit those of one process."""

from pathlib import Path

import pytest
import torch
from qwen3_tiny import LORA, VOCABULARY
from qwen3_trainer import adapted_model
from torch import Tensor

from lora_plugins_sdk import LoraConfig, PeftAdapter, export_adapter, import_adapter, read_adapter
from lora_plugins_sdk.testing import Layout, current_run, run_world

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
]
HEAD = "base_model.model.lm_head.lora_B.weight"


def round_trip(checkpoint: Path, adapter: Path) -> tuple[PeftAdapter, PeftAdapter]:
    """Export of the fresh adapter, and of the one that was imported."""
    model, _ = adapted_model(checkpoint, None, current_run(), LORA)
    fresh = export_adapter(model, "base")
    import_adapter(model, read_adapter(adapter))
    return fresh, export_adapter(model, "base")


@pytest.fixture(scope="module")
def fresh(checkpoint: Path, adapter: Path) -> PeftAdapter:
    return run_world(round_trip, Layout(), checkpoint, adapter)[0][0]


def assert_equal(mine: PeftAdapter, expected: dict[str, Tensor]) -> None:
    assert mine.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine.tensors[name].dtype == tensor.dtype and torch.equal(mine.tensors[name], tensor), name


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_same_on_every_rank_of_every_topology(
    layout: Layout, checkpoint: Path, adapter: Path, fresh: PeftAdapter
) -> None:
    """B5, B10, B11, B22, B23, B42: initial values, all stages, gate|up and q|k|v per shard, padded vocabulary."""
    saved = read_adapter(adapter)
    for initial, imported in run_world(round_trip, layout, checkpoint, adapter):
        assert_equal(initial, dict(fresh.tensors))
        assert_equal(imported, dict(saved.tensors))
        assert imported.tensors[HEAD].shape == (VOCABULARY, LORA.rank)
        assert imported.config == fresh.config


def export_half_precision(checkpoint: Path, adapter: Path) -> dict[str, Tensor]:
    lora = LoraConfig(rank=4, alpha=8, target_modules=LORA.target_modules, dtype="bfloat16")
    model, _ = adapted_model(checkpoint, adapter, current_run(), lora)
    return dict(export_adapter(model).tensors)


@pytest.mark.world
def test_factors_stored_in_bfloat16(checkpoint: Path, adapter: Path) -> None:
    for layout in (Layout(), Layout(tp=2, pp=2, sequence_parallel=True)):
        for exported in run_world(export_half_precision, layout, checkpoint, adapter):
            for name, tensor in read_adapter(adapter).tensors.items():
                assert torch.equal(exported[name], tensor.to(torch.bfloat16)), name


def refused_imports(checkpoint: Path, adapter: Path) -> list[str]:
    """Messages of imports that must not change anything; the export afterwards is checked here."""
    model, _ = adapted_model(checkpoint, adapter, current_run(), LORA)
    before = export_adapter(model).tensors
    saved = read_adapter(adapter)
    name = next(iter(saved.tensors))
    spoiled = [
        {key: value for key, value in saved.tensors.items() if key != name},
        {**saved.tensors, name: saved.tensors[name].t().contiguous()},
        {**saved.tensors, HEAD: torch.zeros(VOCABULARY + 1, LORA.rank)},
    ]
    messages = []
    for tensors in spoiled:
        try:
            import_adapter(model, PeftAdapter(tensors=tensors, config=saved.config))
        except ValueError as error:
            messages.append(str(error))
    after = export_adapter(model).tensors
    assert all(torch.equal(after[key], before[key]) for key in before)
    return messages


@pytest.mark.world
def test_a_bad_adapter_is_refused_alike_on_every_rank(checkpoint: Path, adapter: Path) -> None:
    first, *others = run_world(refused_imports, Layout(tp=2, pp=2), checkpoint, adapter)
    assert len(first) == 3 and all(one == first for one in others)
    assert "is missing" in first[0] and "is transposed" in first[1]
    assert f"shape [{VOCABULARY + 1}, 4], expected [{VOCABULARY}, 4]" in first[2]


def export_layer_targets(checkpoint: Path) -> tuple[list[str], list[str]]:
    lora = LoraConfig(rank=4, target_modules=("*.layers.1.self_attn.q_proj", "*.layers.3.mlp.*"))
    model, attached = adapted_model(checkpoint, None, current_run(), lora)
    exported = export_adapter(model)
    return sorted(exported.tensors), [name for name, _ in attached.named_parameters()]


@pytest.mark.world
def test_layers_keep_their_model_wide_numbers(checkpoint: Path) -> None:
    """B22: a stage counts its layers from zero; the adapter must not."""
    ((expected, _),) = run_world(export_layer_targets, Layout(), checkpoint)
    ranks = run_world(export_layer_targets, Layout(pp=2), checkpoint)
    assert [names for names, _ in ranks] == [expected, expected]
    assert {name.split(".lora")[0] for name in ranks[0][1]} == {"decoder.layers.1.self_attention.linear_qkv"}
    assert {name.split(".lora")[0] for name in ranks[1][1]} == {
        "decoder.layers.3.mlp.linear_fc1",
        "decoder.layers.3.mlp.linear_fc2",
    }
