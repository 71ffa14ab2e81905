"""The policy loss of GRPO, in pieces that add up.

The loss of one optimizer update is a sum over the tokens of its whole batch, divided by one number that is
known before any forward pass. Each microbatch of each data-parallel rank divides its own sum by that same
number; the **sum** of these losses, and of their gradients, over microbatches and ranks is then exactly the
loss of the batch in one piece. A trainer that averages gradients over DP ranks must multiply by their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lora_harness.kl import KlEstimator, kl_estimate, kl_penalty
from lora_harness.token_stats import TokenStats

LossNorm = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """How the loss is formed.

    Args:
        norm: see `loss_normaliser`.
        clip_low, clip_high: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]`` (asymmetric bounds: Yu
            et al. 2025, DAPO); None leaves it unclipped on that side.
        kl_coef: weight of the KL penalty.
        kl_estimator: estimator of the KL penalty and of the reported ``kl``.
    """

    norm: LossNorm = "token"
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"


def loss_normaliser(norm: LossNorm, completion_lengths: Iterable[int], max_new_tokens: int) -> float:
    """The number that an optimizer update's loss sum is divided by.

    Args:
        norm: ``token``: mean over all tokens of the update (DAPO). ``sequence``: mean over sequences of the
            mean over each one's tokens (GRPO as published). ``constant``: sum over tokens over ``sequences *
            max_new_tokens`` (Dr. GRPO).
        completion_lengths: number of trained tokens of every sequence of the update: all microbatches, all DP
            ranks. Sequences without a token (padding rows) do not count.
        max_new_tokens: longest completion, used by ``constant``.

    Returns:
        A positive number; 1 when there is no token at all, where every loss sum is 0.
    """
    lengths = [length for length in completion_lengths if length > 0]
    match norm:
        case "token":
            total = sum(lengths)
        case "sequence":
            total = len(lengths)
        case "constant":
            total = len(lengths) * max_new_tokens
    return float(total or 1)


def policy_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor,
    normaliser: float,
    options: LossOptions,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, TokenStats]:
    """Clipped policy-gradient loss (Schulman et al. 2017, PPO, eq. 7) with a KL penalty, of one microbatch.

    Args:
        logprobs: [batch, sequence] of the policy in training, differentiable.
        advantages: [batch], one a sequence.
        mask: [batch, sequence] bool, True at completion tokens. Values elsewhere are ignored, even NaN.
        normaliser: `loss_normaliser` of the whole optimizer update.
        options: how the loss is formed.
        old_logprobs: [batch, sequence] of the policy before this step's first update; None when this is the
            first update, where they equal `logprobs` and the ratio is 1.
        ref_logprobs: [batch, sequence] of the reference; needed when ``options.kl_coef > 0``.
        entropy: [batch, sequence] in nats, reported only.

    Returns:
        The loss, 0-d: this microbatch's share of the update's loss. And statistics: ``clip_share`` (tokens
        whose gradient the clip removed), ``approx_kl`` (k3 of the policy before the step against the one in
        training), ``kl`` when there is a reference, ``entropy`` when given.
    """
    assert logprobs.shape == mask.shape and mask.dtype == torch.bool
    assert options.kl_coef == 0 or ref_logprobs is not None, "a KL penalty needs reference log-probs"
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old = logprobs.detach() if old_logprobs is None else old_logprobs.masked_fill(~mask, 0.0)
    advantage = advantages.to(logprobs.dtype)[:, None]

    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(*_bounds(options)) * advantage
    per_token = -torch.minimum(ratio * advantage, bounded)
    current = logprobs.detach()
    statistics = {
        "clip_share": (bounded < ratio * advantage).float(),
        "approx_kl": kl_estimate(old, current, "k3"),
    }

    if ref_logprobs is not None:
        reference = ref_logprobs.masked_fill(~mask, 0.0)
        statistics["kl"] = kl_estimate(current, reference, options.kl_estimator)
        if options.kl_coef > 0:
            per_token = per_token + options.kl_coef * kl_penalty(logprobs, reference, options.kl_estimator)
    if entropy is not None:
        statistics["entropy"] = entropy

    loss = (per_token * _token_weights(mask, options.norm).to(per_token.dtype)).sum() / normaliser
    return loss, TokenStats.over(mask, statistics)


def logprob_gap(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> TokenStats:
    """How far trainer and engine disagree on the tokens the engine drew: ``logprob_gap_mean`` and
    ``logprob_gap_max``.

    All tensors are [batch, sequence]. The gap is the absolute difference of log-probabilities in nats.
    """
    gap = (train_logprobs.detach() - rollout_logprobs).abs()
    return TokenStats.over(mask, {"logprob_gap_mean": gap}, {"logprob_gap_max": gap})


def _token_weights(mask: Tensor, norm: LossNorm) -> Tensor:
    """[batch, sequence] weight of each token's loss before the division by the normaliser; 0 outside the
    mask."""
    weights = mask.double()
    if norm == "sequence":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
    return weights


def _bounds(options: LossOptions) -> tuple[float, float]:
    low = 0.0 if options.clip_low is None else 1.0 - options.clip_low
    high = float("inf") if options.clip_high is None else 1.0 + options.clip_high
    return low, high
