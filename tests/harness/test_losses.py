"""The policy loss against a slow, obvious implementation; exact sums over any split into microbatches and ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lora_harness.kl import KlEstimator
from lora_harness.losses import LossNorm, LossOptions, logprob_gap, loss_normaliser, policy_loss

MAX_NEW_TOKENS = 9
NORMS: tuple[LossNorm, ...] = ("token", "sequence", "constant")
KLS: tuple[tuple[float, KlEstimator], ...] = ((0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3"))
OPTIONS = [
    LossOptions(norm=norm, clip_low=low, clip_high=high, kl_coef=coef, kl_estimator=kind)
    for norm in NORMS
    for low, high in ((None, None), (0.2, 0.2), (0.1, 0.4))
    for coef, kind in KLS
]


def make_batch(seed: int = 0, sequences: int = 7, length: int = 9) -> dict[str, torch.Tensor]:
    """Random log-probs in fp64; one sequence without any completion token, as a padding row has."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return -torch.rand(sequences, length, generator=generator, dtype=torch.float64) * 2

    mask = torch.zeros(sequences, length, dtype=torch.bool)
    for row in range(1, sequences):
        first = row % 3
        mask[row, first : first + 1 + (row * 5) % (length - 2)] = True
    return {
        "logprobs": draw(),
        "old_logprobs": draw(),
        "ref_logprobs": draw(),
        "entropy": -draw(),
        "advantages": torch.randn(sequences, generator=generator, dtype=torch.float64),
        "mask": mask,
    }


def normaliser_of(batch: dict[str, torch.Tensor], norm: LossNorm) -> float:
    return loss_normaliser(norm, batch["mask"].sum(dim=1).tolist(), MAX_NEW_TOKENS)


def run(batch: dict[str, torch.Tensor], options: LossOptions, normaliser: float, rows: list[int] | None = None):
    """Loss, gradient of the log-probs (zero outside `rows`) and statistics of a part of the batch."""
    rows = list(range(len(batch["mask"]))) if rows is None else rows
    part = {name: values[rows] for name, values in batch.items()}
    logprobs = part.pop("logprobs").clone().requires_grad_()
    loss, stats = policy_loss(logprobs, normaliser=normaliser, options=options, **part)
    gradient = torch.zeros_like(batch["logprobs"])
    gradient[rows] = torch.autograd.grad(loss, logprobs)[0]
    return loss.detach(), gradient, stats


def obvious_loss(batch: dict[str, torch.Tensor], options: LossOptions) -> tuple[float, dict[str, float]]:
    """The whole batch's loss and statistics with loops and floats."""
    low = -math.inf if options.clip_low is None else 1 - options.clip_low
    high = math.inf if options.clip_high is None else 1 + options.clip_high
    sequences, clipped, approx, kls, entropies = [], [], [], [], []
    for row, advantage in enumerate(batch["advantages"].tolist()):
        tokens = []
        for column in batch["mask"][row].nonzero().flatten().tolist():
            new, old, ref = (batch[n][row, column].item() for n in ("logprobs", "old_logprobs", "ref_logprobs"))
            ratio = math.exp(new - old)
            plain, bounded = ratio * advantage, min(max(ratio, low), high) * advantage
            kl = {"k1": new - ref, "k2": (ref - new) ** 2 / 2, "k3": math.exp(ref - new) - 1 - (ref - new)}
            tokens.append(-min(plain, bounded) + options.kl_coef * kl[options.kl_estimator])
            clipped.append(bounded < plain)
            approx.append(math.exp(new - old) - 1 - (new - old))
            kls.append(kl[options.kl_estimator])
            entropies.append(batch["entropy"][row, column].item())
        if tokens:
            sequences.append(tokens)
    everything = [token for tokens in sequences for token in tokens]
    loss = {
        "token": sum(everything) / len(everything),
        "sequence": sum(sum(tokens) / len(tokens) for tokens in sequences) / len(sequences),
        "constant": sum(everything) / (len(sequences) * MAX_NEW_TOKENS),
    }[options.norm]
    names = ("clip_share", "approx_kl", "kl", "entropy")
    means = [sum(values) / len(values) for values in (clipped, approx, kls, entropies)]
    return loss, dict(zip(names, means, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_obvious_implementation(options):
    batch = make_batch()
    loss, _, stats = run(batch, options, normaliser_of(batch, options.norm))
    expected, expected_stats = obvious_loss(batch, options)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert stats.values() == pytest.approx(expected_stats, rel=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_is_that_of_finite_differences(options):
    batch = make_batch(seed=3, sequences=4, length=5)
    normaliser = normaliser_of(batch, options.norm)
    _, gradient, _ = run(batch, options, normaliser)
    if options.kl_coef and options.kl_estimator == "k1":  # differentiated as k2, see `kl_penalty`
        options = LossOptions(
            norm=options.norm, clip_low=options.clip_low, clip_high=options.clip_high, kl_coef=0.3, kl_estimator="k2"
        )
    step = 1e-6
    for row, column in [(0, 0), (1, 1), (2, 2), (2, 3), (3, 0), (3, 4)]:
        around = []
        for sign in (step, -step):
            moved = {**batch, "logprobs": batch["logprobs"].clone()}
            moved["logprobs"][row, column] += sign
            around.append(run(moved, options, normaliser)[0].item())
        assert gradient[row, column].item() == pytest.approx((around[0] - around[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_split_adds_up_to_the_batch_in_one_piece(options, seed):
    """Token normalisation under DP and gradient accumulation (B2)."""
    batch = make_batch(seed)
    normaliser = normaliser_of(batch, options.norm)
    whole_loss, whole_gradient, whole_stats = run(batch, options, normaliser)
    rows = list(range(len(batch["mask"])))
    random.Random(seed).shuffle(rows)
    cuts = sorted(random.Random(seed).sample(range(1, len(rows)), 3))
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    pieces = [run(batch, options, normaliser, part) for part in parts]
    torch.testing.assert_close(sum(piece[0] for piece in pieces), whole_loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(piece[1] for piece in pieces), whole_gradient, rtol=1e-12, atol=1e-14)
    total = pieces[0][2]
    for piece in pieces[1:]:
        total = total + piece[2]
    assert total.values() == pytest.approx(whole_stats.values(), rel=1e-12)


def test_a_mean_of_microbatch_means_would_be_wrong():
    """Shows that the split test can fail: per-microbatch normalisers do not give the batch's loss."""
    batch, options = make_batch(), LossOptions(norm="token")
    whole, _, _ = run(batch, options, normaliser_of(batch, "token"))
    halves = [[0, 1, 2], [3, 4, 5, 6]]
    means = [run(batch, options, batch["mask"][rows].sum().item(), rows)[0].item() for rows in halves]
    assert abs(sum(means) / 2 - whole.item()) > 1e-3


def test_values_outside_the_mask_do_not_matter():
    batch, options = make_batch(), LossOptions(clip_low=0.2, clip_high=0.2, kl_coef=0.1)
    normaliser = normaliser_of(batch, "token")
    clean = run(batch, options, normaliser)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy"):
        batch[name] = batch[name].masked_fill(~batch["mask"], float("nan" if name == "entropy" else "-inf"))
    loss, gradient, stats = run(batch, options, normaliser)
    assert torch.equal(loss, clean[0]) and torch.equal(gradient, clean[1])
    assert stats.values() == clean[2].values()
    assert (gradient[~batch["mask"]] == 0).all()


def test_without_old_logprobs_the_ratio_is_one():
    """The first update of a step: value -mean(A), gradient -A / N, no clip, no approx_kl."""
    batch = make_batch()
    del batch["old_logprobs"], batch["ref_logprobs"]
    count = batch["mask"].sum().item()
    loss, gradient, stats = run(batch, LossOptions(clip_low=0.1, clip_high=0.1), count)
    per_token = batch["advantages"][:, None] * batch["mask"]
    assert loss.item() == pytest.approx(-per_token.sum().item() / count)
    torch.testing.assert_close(gradient, -per_token / count)
    values = stats.values()
    assert values["clip_share"] == 0 and values["approx_kl"] == 0 and "kl" not in values


def test_no_token_at_all_gives_zero_without_nan():
    batch = make_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    for norm in NORMS:
        options = LossOptions(norm=norm, kl_coef=0.1)
        loss, gradient, stats = run(batch, options, normaliser_of(batch, norm))
        assert loss.item() == 0 and not gradient.any()
        assert set(stats.values().values()) == {0.0}


def test_normalisers_count_only_sequences_with_tokens():
    lengths = [3, 0, 5, 1]
    assert loss_normaliser("token", lengths, 8) == 9
    assert loss_normaliser("sequence", lengths, 8) == 3
    assert loss_normaliser("constant", lengths, 8) == 24
    assert {loss_normaliser(norm, [0, 0], 8) for norm in NORMS} == {1.0}


def test_logprob_gap_mean_and_max_aggregate_over_parts():
    train = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -9.0]])
    engine = torch.tensor([[-1.5, -2.0, -3.0], [-0.75, -1.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    total = logprob_gap(train[:1], engine[:1], mask[:1]) + logprob_gap(train[1:], engine[1:], mask[1:])
    assert total.values() == pytest.approx({"logprob_gap_mean": 0.75 / 5, "logprob_gap_max": 0.5})
