"""The output head: padded vocabulary, tied weight."""

from pathlib import Path

import pytest
import torch
from qwen3_tiny import VOCABULARY, make_adapter, make_checkpoint, microbatches, positions
from qwen3_trainer import adapted_model, local, loss_of
from torch import Tensor

from lora_plugins_sdk import LoraConfig, LoraError, export_adapter, import_adapter, read_adapter, reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world

HEAD = LoraConfig(rank=4, alpha=8, target_modules=("lm_head",))
NAME = "base_model.model.lm_head.lora_B.weight"


def train_head(checkpoint: Path, adapter: Path) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's B gradient, its B, and its logits, with the columns past the vocabulary masked in the loss."""
    run = current_run()
    model, attached = adapted_model(checkpoint, adapter, run, HEAD)
    tokens = microbatches()[0]
    logits = model(tokens[:, :-1], positions(tokens[:, :-1]), None)
    loss_of(logits, tokens[:, 1:], run).backward()
    reduce_grads(model)
    values = local(attached, "data")["lm_head", "B"]
    exported = export_adapter(model)
    assert exported.tensors[NAME].shape == (VOCABULARY, HEAD.rank)
    with torch.no_grad():
        attached.parameters()[1].fill_(5.0)
    import_adapter(model, exported)
    assert torch.equal(local(attached, "data")["lm_head", "B"], values), "import must restore the padding too"
    return local(attached, "grad")["lm_head", "B"], values, logits.detach()


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_padding_rows(layout: Layout, checkpoint: Path, tmp_path: Path) -> None:
    """B42: 301 rows on two ranks are 151 and 150, and one row that belongs to no token."""
    adapter = make_adapter(tmp_path, checkpoint, HEAD)
    first, last = run_world(train_head, layout, checkpoint, adapter)
    for grad, values, logits in (first, last):
        assert grad.shape == values.shape == (151, 4) and logits.shape[-1] == 151
    grad, values, logits = last
    assert torch.equal(grad[-1], torch.zeros(4)) and torch.equal(values[-1], torch.zeros(4))
    assert torch.equal(logits[..., -1], torch.zeros_like(logits[..., -1]))
    ((single, _, _),) = run_world(train_head, Layout(), checkpoint, adapter)
    assert (torch.cat([first[0], grad])[:VOCABULARY] - single).abs().max() <= 1e-6
    saved = read_adapter(adapter).tensors[NAME]
    assert torch.equal(torch.cat([first[1], values])[:VOCABULARY], saved)


def attach_to_tied(checkpoint: Path, targets: tuple[str, ...]) -> str:
    try:
        adapted_model(checkpoint, None, current_run(), LoraConfig(rank=4, target_modules=targets))
    except LoraError as error:
        return str(error)
    return "attached"


@pytest.mark.world
def test_tied_embeddings(tmp_path: Path) -> None:
    """B42: a tied head is refused with the reason; everything else is adapted as usual."""
    checkpoint = make_checkpoint(tmp_path, tie_word_embeddings=True)
    for layout in (Layout(), Layout(tp=2)):
        for message in run_world(attach_to_tied, layout, checkpoint, ("lm_head",)):
            assert "tie_word_embeddings: the weight is model.embed_tokens.weight itself" in message
        assert set(run_world(attach_to_tied, layout, checkpoint, ("all-linear",))) == {"attached"}
