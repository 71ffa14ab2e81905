"""Estimators of the KL divergence of the policy from the reference, from tokens that the policy drew."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats (Schulman 2020, Approximating KL Divergence).

    With ``d = ref_logprobs - logprobs``: k1 = ``-d`` (unbiased, may be negative), k2 = ``d**2 / 2`` (biased,
    low variance), k3 = ``exp(d) - 1 - d`` (unbiased, never negative).
    """
    difference = ref_logprobs - logprobs
    match kind:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.expm1() - difference


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KlEstimator) -> Tensor:
    """`kl_estimate` as a term of a loss that is differentiated.

    k2 and k3 are differentiated as they stand. k1 is not: its derivative is that of ``logprobs`` alone, which
    knows nothing of the reference and is 0 in expectation (Tang and Munos 2025, On a few pitfalls in KL
    divergence gradient estimation for RL). Here k1 keeps its value and takes the score-function gradient of
    the KL, ``(logprobs - ref_logprobs) * grad logprobs``, which is also k2's.
    """
    if kind != "k1":
        return kl_estimate(logprobs, ref_logprobs, kind)
    gradient_of = kl_estimate(logprobs, ref_logprobs, "k2")
    return gradient_of + (kl_estimate(logprobs, ref_logprobs, "k1") - gradient_of).detach()
