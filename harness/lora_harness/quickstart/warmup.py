"""Supervised learning of a model on prompts with answers, and its exact accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lora_harness.tasks import Example

_IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Share of problems answered exactly.

    Args:
        sampled: mean probability of the whole right answer at temperature 1, i.e. the expected reward of a sample.
        greedy: share of problems whose every token is the most likely one.
    """

    sampled: float
    greedy: float


def encode(tokenizer: Any, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [examples, longest], padded on the right.

    Labels hold the answer and the end of sequence, and -100 (which `cross_entropy` leaves out) elsewhere.
    """
    encoded = [
        (tokenizer(one.prompt)["input_ids"], [*tokenizer(one.answer)["input_ids"], tokenizer.eos_token_id])
        for one in examples
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in encoded)
    ids = torch.full((len(encoded), longest), tokenizer.pad_token_id)
    labels = torch.full((len(encoded), longest), _IGNORED)
    for row, (prompt, answer) in enumerate(encoded):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def accuracy(model: Any, ids: Tensor, labels: Tensor) -> Accuracy:
    """Exact accuracy by teacher forcing; no sampling noise."""
    logits, targets = model(input_ids=ids).logits[:, :-1], labels[:, 1:]
    counted = targets != _IGNORED
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    right = (logits.argmax(-1) == targets) | ~counted
    return Accuracy(sampled=float((logprobs * counted).sum(1).exp().mean()), greedy=float(right.all(1).float().mean()))


def training_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> None:
    """One full-parameter update on the mean cross-entropy of the answers' tokens, gradient norm clipped to 1."""
    logits = model(input_ids=ids).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
