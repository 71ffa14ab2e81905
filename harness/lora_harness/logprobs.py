"""Log-probability of the chosen token and entropy, from logits that are split over the vocabulary.

With tensor parallelism each rank holds the logits of ``V_local`` columns of the padded vocabulary. Four
numbers per token cross the ranks (maximum, two sums over exponentials, chosen logit); the full logits are
never gathered, and the backward pass is local.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Rows are processed in pieces of about this many logits, so temporaries stay small next to the logits
# themselves.
CHUNK_ELEMENTS = 1 << 22


class TokenLogProbs(NamedTuple):
    """Per-token results; both have the shape of the targets, fp32.

    Attributes:
        logprobs: log-probability of the target, differentiable with respect to the logits.
        entropy: entropy of the distribution in nats, not differentiable.
    """

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenLogProbs:
    """Log-softmax of ``logits / temperature`` at the targets.

    Args:
        logits: [..., V_local], this rank's columns: global columns ``rank * V_local`` and on. Any float
            dtype; computed in fp32.
        targets: [...] global token ids below `vocab_size`, the same on every TP rank.
        vocab_size: number of real tokens. Columns from here on are padding and have probability 0, so a
            padded model equals the unpadded one.
        temperature: the one that the completions were sampled with.
        tp_group: ranks that share the vocabulary, in column order; None when this rank holds all of it.
    """
    assert logits.shape[:-1] == targets.shape, f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}"
    rank = dist.get_rank(tp_group) if tp_group is not None else 0
    start = rank * logits.shape[-1]
    columns = min(max(vocab_size - start, 0), logits.shape[-1])
    logprobs, entropy = _SelectedLogProb.apply(logits, targets, start, columns, 1.0 / temperature, tp_group)
    return TokenLogProbs(logprobs, entropy)


class _SelectedLogProb(torch.autograd.Function):
    """Saves the logits (which live anyway) and two numbers a row; the backward pass recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        columns: int,
        inverse_temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows = logits.reshape(-1, logits.shape[-1])[:, :columns]
        local = targets.reshape(-1) - start
        maximum = torch.full_like(local, float("-inf"), dtype=torch.float32)
        # Per row: sum of exp(z - max), sum of exp(z - max) * (z - max), z of the target - max (on its owner,
        # else 0).
        sums = torch.zeros(3, rows.shape[0], dtype=torch.float32, device=logits.device)
        if columns:
            maximum = rows.amax(dim=1).float() * inverse_temperature
        if group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        for piece in _pieces(rows):
            shifted = _shifted(rows[piece], inverse_temperature, maximum[piece])
            sums[2, piece] = _at_owned(shifted, local[piece])
            weights = shifted.exp()
            sums[0, piece] = weights.sum(dim=1)
            sums[1, piece] = weights.mul_(shifted).sum(dim=1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_normaliser = sums[0].log()
        ctx.save_for_backward(logits, local, maximum, log_normaliser)
        ctx.columns, ctx.inverse_temperature = columns, inverse_temperature
        logprobs = (sums[2] - log_normaliser).view_as(targets)
        entropy = (log_normaliser - sums[1] / sums[0]).view_as(targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, local, maximum, log_normaliser = ctx.saved_tensors
        grad_rows = (grads[0].reshape(-1) * ctx.inverse_temperature).float()
        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad_flat = grad_logits.view(-1, logits.shape[-1])
        grad_flat[:, ctx.columns :] = 0
        rows = logits.reshape(-1, logits.shape[-1])[:, : ctx.columns]
        for piece in _pieces(rows):
            shifted = _shifted(rows[piece], ctx.inverse_temperature, maximum[piece])
            minus_softmax = shifted.sub_(log_normaliser[piece, None]).exp_().neg_()
            target = local[piece].clamp(0, ctx.columns - 1)
            minus_softmax.scatter_add_(1, target[:, None], _owned(local[piece], ctx.columns).float()[:, None])
            grad_flat[piece, : ctx.columns] = minus_softmax.mul_(grad_rows[piece, None])
        return grad_logits, None, None, None, None, None


def _pieces(rows: Tensor) -> list[slice]:
    if rows.shape[1] == 0:
        return []
    size = max(1, CHUNK_ELEMENTS // rows.shape[1])
    return [slice(begin, min(begin + size, rows.shape[0])) for begin in range(0, rows.shape[0], size)]


def _shifted(rows: Tensor, scale: float, maximum: Tensor) -> Tensor:
    """``rows * scale - maximum`` in fp32, in memory of its own: the caller works in place and logits must stay."""
    return rows.to(torch.float32, copy=True).mul_(scale).sub_(maximum[:, None])


def _owned(local: Tensor, columns: int) -> Tensor:
    return (local >= 0) & (local < columns)


def _at_owned(values: Tensor, local: Tensor) -> Tensor:
    """values[i, local[i]] where this rank owns that column, else 0."""
    picked = values.gather(1, local.clamp(0, values.shape[1] - 1)[:, None]).squeeze(1)
    return picked.masked_fill(~_owned(local, values.shape[1]), 0.0)
