"""Dropout under tensor parallelism: one mask for one value, different masks for different values."""

from pathlib import Path

import pytest
import torch
from qwen3_tiny import VOCABULARY, make_adapter, microbatches, positions
from qwen3_trainer import adapted_model
from torch import Tensor

from lora_plugins_sdk import LoraConfig
from lora_plugins_sdk.testing import Layout, current_run, run_world


def dropped(checkpoint: Path, adapter: Path, lora: LoraConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits in training mode, and what each kind of site drops from ones."""
    model, attached = adapted_model(checkpoint, adapter, current_run(), lora)
    model.train()
    tokens = microbatches()[0][:, :-1]
    torch.manual_seed(5)
    with torch.no_grad():
        logits = model(tokens, positions(tokens), None)
    masks = {}
    for factors in attached.factors():
        torch.manual_seed(6)
        masks[factors.plan.site.name] = factors.drop(torch.ones(40, 8))
    return logits, masks


@pytest.mark.world
def test_column_sites_drop_the_same_entries_on_every_rank(checkpoint: Path, tmp_path: Path) -> None:
    """Without SP every rank sees the whole input: another mask per rank would be another adapter per rank."""
    lora = LoraConfig(rank=4, alpha=8, dropout=0.3, target_modules=("linear_qkv", "linear_fc1", "lm_head"))
    adapter = make_adapter(tmp_path, checkpoint, lora)
    ((single, _),) = run_world(dropped, Layout(), checkpoint, adapter, lora)
    shards = [logits for logits, _ in run_world(dropped, Layout(tp=2), checkpoint, adapter, lora)]
    assert (torch.cat(shards, dim=-1)[..., :VOCABULARY] - single).abs().max() <= 1e-5


@pytest.mark.world
def test_ranks_with_different_parts_drop_independently(checkpoint: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8, dropout=0.3)
    adapter = make_adapter(tmp_path, checkpoint, lora)
    (_, first), (_, second) = run_world(dropped, Layout(tp=2), checkpoint, adapter, lora)
    for site in ("linear_qkv", "linear_fc1"):
        assert torch.equal(first[site], second[site])
    for site in ("linear_proj", "linear_fc2"):
        assert not torch.equal(first[site], second[site])
    (_, first), (_, second) = run_world(dropped, Layout(tp=2, sequence_parallel=True), checkpoint, adapter, lora)
    assert not any(torch.equal(first[site], second[site]) for site in first)
