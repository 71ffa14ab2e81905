"""PEFT saves embedding and head along with an adapter on them: accepted only where they are the base's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qwen3_tiny import LORA, VOCABULARY, hf_model
from qwen3_trainer import adapted_model

from lora_plugins_sdk import LoraError, PeftAdapter, export_adapter, import_adapter, read_adapter
from lora_plugins_sdk.testing import Layout, current_run, run_world

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=2)]
HEAD, EMBEDDING = (f"base_model.model.{one}.base_layer.weight" for one in ("lm_head", "model.embed_tokens"))


@pytest.fixture(scope="module")
def saved(checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    """The adapter as PEFT itself writes it."""
    from peft import PeftModel

    directory = tmp_path_factory.mktemp("peft")
    PeftModel.from_pretrained(hf_model(checkpoint), str(adapter)).save_pretrained(str(directory))
    written = read_adapter(directory)
    assert written.tensors[HEAD].shape == written.tensors[EMBEDDING].shape == (VOCABULARY, 64)
    return written


def load(checkpoint: Path, saved: PeftAdapter) -> tuple[str, PeftAdapter]:
    """Why the adapter was refused, and what is attached afterwards."""
    model, _ = adapted_model(checkpoint, None, current_run(), LORA)
    try:
        import_adapter(model, saved)
    except LoraError as error:
        return str(error), export_adapter(model)
    return "", export_adapter(model)


@pytest.mark.world
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_bases_own_are_accepted(checkpoint: Path, saved: PeftAdapter, layout: Layout) -> None:
    for refused, exported in run_world(load, layout, checkpoint, saved):
        assert refused == ""
        for name, tensor in exported.tensors.items():
            assert torch.equal(tensor, saved.tensors[name])


@pytest.mark.world
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_trained_ones_are_refused_on_every_rank(
    checkpoint: Path, saved: PeftAdapter, layout: Layout, name: str
) -> None:
    """One changed number, on the last rank's shard: no rank may have loaded anything."""
    changed = saved.tensors[name].clone()
    changed[-1, -1] += 1
    other = PeftAdapter(tensors={**saved.tensors, name: changed}, config=saved.config)
    for refused, exported in run_world(load, layout, checkpoint, other):
        assert f"{name}: is in the adapter as a whole weight, and not as the base has it" in refused
        zero = [one for key, one in exported.tensors.items() if "lora_B" in key or "lora_embedding_A" in key]
        assert len(zero) == len(exported.tensors) / 2 and not any(tensor.any() for tensor in zero)


@pytest.mark.world
def test_one_weight_under_two_names(checkpoint: Path, saved: PeftAdapter) -> None:
    """PEFT names the embedding so where it has no adapter; beside the other, one of the two would go unseen."""
    plain = EMBEDDING.replace(".base_layer", "")
    own = {name: tensor for name, tensor in saved.tensors.items() if name != EMBEDDING}
    alone = PeftAdapter(tensors={**own, plain: saved.tensors[EMBEDDING]}, config=saved.config)
    both = PeftAdapter(tensors={**saved.tensors, plain: saved.tensors[EMBEDDING] + 1}, config=saved.config)
    for refused, _ in run_world(load, Layout(tp=2), checkpoint, alone):
        assert refused == ""
    for refused, _ in run_world(load, Layout(tp=2), checkpoint, both):
        assert f"{plain}: and {EMBEDDING} are both model.embed_tokens.weight" in refused


@pytest.mark.world
def test_a_resized_vocabulary_is_refused(checkpoint: Path, saved: PeftAdapter) -> None:
    longer = torch.cat([saved.tensors[HEAD], torch.zeros(40, 64)])
    other = PeftAdapter(tensors={**saved.tensors, HEAD: longer}, config=saved.config)
    for refused, _ in run_world(load, Layout(tp=2), checkpoint, other):
        assert f"{HEAD}: is of another size than the base's: shape [341, 64]" in refused


@pytest.mark.world
def test_a_weight_that_is_no_tensor_of_its_own_is_refused(checkpoint: Path, saved: PeftAdapter) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    other = PeftAdapter(tensors={**saved.tensors, name: torch.zeros(128, 64)}, config=saved.config)
    ((refused, _),) = run_world(load, Layout(), checkpoint, other)
    assert f"{name}: is no weight of the base by itself" in refused
