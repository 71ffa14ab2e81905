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
# Also one process whose vocabulary is padded, and a last rank that holds nothing but padding.
PADDED = [
    (Layout(tp=2), 151),
    (Layout(tp=2, sequence_parallel=True), 151),
    (Layout(make_vocab_size_divisible_by=128), 384),
    (Layout(tp=2, make_vocab_size_divisible_by=128), 256),
    (Layout(tp=2, make_vocab_size_divisible_by=304), 304),
]
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
@pytest.mark.parametrize(("layout", "rows"), PADDED, ids=str)
def test_padding_rows(layout: Layout, rows: int, checkpoint: Path, tmp_path: Path) -> None:
    """B42: 301 rows on two ranks: 151, 150 and one that belongs to no token; or as many as Megatron-LM adds."""
    adapter = make_adapter(tmp_path, checkpoint, HEAD)
    grads, values, logits = zip(*run_world(train_head, layout, checkpoint, adapter), strict=True)
    assert all(one.shape == (rows, 4) for one in (*grads, *values)) and all(one.shape[-1] == rows for one in logits)
    grad, value, logit = torch.cat(grads), torch.cat(values), torch.cat(logits, dim=-1)
    assert not any(one.any() for one in (grad[VOCABULARY:], value[VOCABULARY:], logit[..., VOCABULARY:]))
    ((single, _, expected),) = run_world(train_head, Layout(), checkpoint, adapter)
    assert (grad[:VOCABULARY] - single).abs().max() <= 1e-6
    assert (logit[..., :VOCABULARY] - expected).abs().max() <= 1e-5
    assert torch.equal(value[:VOCABULARY], read_adapter(adapter).tensors[NAME])


def gradient_of_all_columns(checkpoint: Path, adapter: Path) -> Tensor:
    """This rank's B gradient under a loss that takes padding for tokens, as Megatron-LM's own does."""
    model, attached = adapted_model(checkpoint, adapter, current_run(), HEAD)
    tokens = microbatches()[0][:, :-1]
    torch.logsumexp(model(tokens, positions(tokens), None), dim=-1).sum().backward()
    return local(attached, "grad")["lm_head", "B"]


@pytest.mark.world
@pytest.mark.parametrize(("layout", "rows"), PADDED, ids=str)
def test_a_loss_over_the_padding_does_not_train_it(layout: Layout, rows: int, checkpoint: Path, tmp_path: Path) -> None:
    """B42: what no export holds must stay zero, or the served policy is another than the trained one."""
    adapter = make_adapter(tmp_path, checkpoint, HEAD)
    grad = torch.cat(run_world(gradient_of_all_columns, layout, checkpoint, adapter))
    assert grad[:VOCABULARY].all() and len(grad) > VOCABULARY and not grad[VOCABULARY:].any()


def attach_to_tied(checkpoint: Path, targets: tuple[str, ...]) -> str:
    try:
        adapted_model(checkpoint, None, current_run(), LoraConfig(rank=4, target_modules=targets))
    except LoraError as error:
        return str(error)
    return "attached"


@pytest.mark.world
def test_tied_embeddings(tmp_path: Path) -> None:
    """B42: a tied head or embedding is refused with the reason; everything else is adapted as usual."""
    checkpoint = make_checkpoint(tmp_path, tie_word_embeddings=True)
    for layout in (Layout(), Layout(tp=2)):
        for message in run_world(attach_to_tied, layout, checkpoint, ("embed_tokens", "lm_head")):
            assert "tie_word_embeddings: the weight is model.embed_tokens.weight itself" in message
            assert "(model.embed_tokens): the config sets tie_word_embeddings: the weight is lm_head.weight" in message
            assert "drop embed_tokens from the targets, or use a base whose weight is its own" in message
        assert set(run_world(attach_to_tied, layout, checkpoint, ("all-linear",))) == {"attached"}
