"""Vocabulary-parallel log-probs against torch.log_softmax, on one process and on ranks that split the vocabulary."""

from __future__ import annotations

import pytest
import torch

from lora_harness import logprobs as module
from lora_harness.logprobs import token_logprobs
from lora_plugins_sdk.testing import Layout, current_run, run_world

VOCAB, PADDED = 21, 32


def make_logits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [s, b, PADDED] with large garbage in the padding, targets [s, b] that hit both ends, output gradients."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, PADDED, generator=generator) * 4 + 20
    logits[..., VOCAB:] = 1e4
    targets = torch.randint(0, VOCAB, (5, 3), generator=generator)
    targets[0, 0], targets[0, 1], targets[0, 2] = 0, VOCAB - 1, PADDED // 2
    return logits.to(dtype), targets, torch.randn(5, 3, generator=generator)


def oracle(logits: torch.Tensor, targets: torch.Tensor, grads: torch.Tensor, temperature: float):
    """fp64 log_softmax of the real columns: log-probs, entropy, gradient of all columns."""
    leaf = logits.double().requires_grad_()
    distribution = (leaf[..., :VOCAB] / temperature).log_softmax(-1)
    chosen = distribution.gather(-1, targets[..., None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    (gradient,) = torch.autograd.grad(chosen, leaf, grads.double())
    return chosen.detach(), entropy.detach(), gradient


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [1, 70, 1 << 22])
def test_equals_log_softmax(monkeypatch, temperature, chunk):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    logits, targets, grads = make_logits()
    leaf = logits.clone().requires_grad_()
    found = token_logprobs(leaf, targets, vocab_size=VOCAB, temperature=temperature)
    (found_gradient,) = torch.autograd.grad(found.logprobs, leaf, grads)
    logprobs, entropy, gradient = oracle(logits, targets, grads, temperature)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=1e-5, atol=2e-6)
    assert not found.entropy.requires_grad and torch.equal(leaf, logits)


def test_padding_columns_are_as_good_as_absent():
    """A padded model equals the unpadded one (B42), and its padding gets no gradient."""
    logits, targets, grads = make_logits()
    padded, bare = logits.clone().requires_grad_(), logits[..., :VOCAB].clone().requires_grad_()
    padded_gradient, bare_gradient = (
        torch.autograd.grad(token_logprobs(leaf, targets, vocab_size=VOCAB).logprobs, leaf, grads)[0]
        for leaf in (padded, bare)
    )
    assert torch.equal(padded_gradient[..., :VOCAB], bare_gradient)
    assert not padded_gradient[..., VOCAB:].any()


def test_bf16_logits_are_computed_in_fp32():
    logits, targets, grads = make_logits(torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    found = token_logprobs(leaf, targets, vocab_size=VOCAB)
    (found_gradient,) = torch.autograd.grad(found.logprobs, leaf, grads)
    logprobs, _, gradient = oracle(logits, targets, grads, 1.0)
    assert found.logprobs.dtype == torch.float32 and found_gradient.dtype == torch.bfloat16
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=1e-2, atol=1e-2)


def test_logits_of_another_layout_than_contiguous():
    logits, targets, grads = make_logits()
    leaf = logits.transpose(0, 1).contiguous().requires_grad_()
    found = token_logprobs(leaf.transpose(0, 1), targets, vocab_size=VOCAB)
    (found_gradient,) = torch.autograd.grad(found.logprobs, leaf, grads)
    gradient = oracle(logits, targets, grads, 1.0)[2].transpose(0, 1)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=1e-5, atol=2e-6)


def split_vocabulary(padded: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = current_run()
    logits, targets, grads = make_logits()
    logits = logits[..., :padded] if padded <= PADDED else torch.nn.functional.pad(logits, (0, padded - PADDED))
    local = logits.chunk(run.facts.tp, dim=-1)[run.tp_rank].contiguous().requires_grad_()
    found = token_logprobs(local, targets, vocab_size=VOCAB, temperature=0.8, tp_group=run.tp_group)
    (gradient,) = torch.autograd.grad(found.logprobs, local, grads)
    return found.logprobs.detach(), found.entropy, gradient


@pytest.mark.world
@pytest.mark.parametrize("padded", [PADDED, 2 * VOCAB], ids=["split", "a-rank-of-padding-only"])
def test_two_ranks_equal_one_process(padded):
    logits, targets, grads = make_logits()
    ranks = run_world(split_vocabulary, Layout(tp=2), padded)
    logprobs, entropy, gradient = oracle(logits, targets, grads, 0.8)
    for found in ranks:
        torch.testing.assert_close(found[0].double(), logprobs, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(found[1].double(), entropy, rtol=1e-5, atol=2e-6)
    assert torch.equal(ranks[0][0], ranks[1][0])
    whole = torch.cat([found[2] for found in ranks], dim=-1)[..., :PADDED]
    torch.testing.assert_close(whole.double(), gradient, rtol=1e-5, atol=2e-6)
