"""KL estimators: their formulas, and what their expectations and gradients are under the policy."""

from __future__ import annotations

import math

import pytest
import torch

from lora_harness.kl import kl_estimate, kl_penalty

POLICY = torch.tensor([0.4, -1.0, 0.9, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.5, 0.3, 0.0], dtype=torch.float64).log_softmax(0)


def exact_kl(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def test_formulas():
    p, r = torch.tensor(-1.3), torch.tensor(-0.4)
    d = 0.9
    assert kl_estimate(p, r, "k1").item() == pytest.approx(-d)
    assert kl_estimate(p, r, "k2").item() == pytest.approx(d * d / 2)
    assert kl_estimate(p, r, "k3").item() == pytest.approx(math.exp(d) - 1 - d)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    logprobs = POLICY.log_softmax(0)
    expectation = (logprobs.exp() * kl_estimate(logprobs, REFERENCE, kind)).sum()
    torch.testing.assert_close(expectation, exact_kl(POLICY))


def test_k3_is_never_negative_and_zero_at_equality():
    difference = torch.linspace(-3, 3, 61)
    assert (kl_estimate(torch.zeros(61), difference, "k3") >= 0).all()
    assert kl_estimate(difference, difference, "k3").tolist() == [0.0] * 61


@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_the_expected_gradient_of_the_k1_and_k2_penalties_is_that_of_the_kl(kind):
    """k1 differentiated as it stands would have the expected gradient 0."""
    truth = torch.autograd.functional.jacobian(exact_kl, POLICY)
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = logprobs.exp().detach()  # the tokens were drawn before the update
    (gradient,) = torch.autograd.grad((weights * kl_penalty(logprobs, REFERENCE, kind)).sum(), logits)
    torch.testing.assert_close(gradient, truth)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_penalty_has_the_value_of_its_estimator(kind):
    logprobs = POLICY.log_softmax(0)
    torch.testing.assert_close(kl_penalty(logprobs, REFERENCE, kind), kl_estimate(logprobs, REFERENCE, kind))
