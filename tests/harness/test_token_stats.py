"""Token statistics over parts and over ranks."""

from __future__ import annotations

import pytest
import torch

from lora_harness.losses import LossOptions, loss_normaliser, policy_loss
from lora_harness.token_stats import TokenStats
from lora_plugins_sdk.testing import Layout, current_run, run_world

OPTIONS = LossOptions(norm="sequence", clip_low=0.1, clip_high=0.3, kl_coef=0.2)


def make_batch() -> dict[str, torch.Tensor]:
    """Six sequences of very different lengths, in fp64."""
    generator = torch.Generator().manual_seed(0)
    names = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")
    batch = {name: -torch.rand(6, 8, generator=generator, dtype=torch.float64) for name in names}
    batch["advantages"] = torch.randn(6, generator=generator, dtype=torch.float64)
    batch["mask"] = torch.arange(8) < torch.tensor([8, 1, 3, 7, 2, 5])[:, None]
    return batch


def loss_and_stats(rows: slice) -> tuple[torch.Tensor, TokenStats]:
    batch = make_batch()
    normaliser = loss_normaliser(OPTIONS.norm, batch["mask"].sum(dim=1).tolist(), 8)
    part = {name: values[rows] for name, values in batch.items()}
    return policy_loss(part.pop("logprobs"), normaliser=normaliser, options=OPTIONS, **part)


def on_a_rank() -> tuple[torch.Tensor, dict[str, float]]:
    run = current_run()
    loss, stats = loss_and_stats(slice(0, 2) if run.dp_rank == 0 else slice(2, 6))
    torch.distributed.all_reduce(loss, group=run.dp_group)
    local_maximum = {"rank": torch.tensor(run.dp_rank + 1.0, dtype=torch.float64)}
    stats = TokenStats(tokens=stats.tokens, sums=stats.sums, maxima=local_maximum)
    return loss, stats.all_reduce(run.dp_group).values()


@pytest.mark.world
def test_uneven_shares_of_two_ranks_equal_one_process():
    """Loss and statistics under DP (B2): shares of 2 and 4 sequences, sums and not means of means."""
    loss, stats = loss_and_stats(slice(None))
    for rank_loss, rank_stats in run_world(on_a_rank, Layout(dp=2)):
        assert rank_loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert rank_stats == pytest.approx(stats.values() | {"rank": 2.0}, rel=1e-12)


def test_no_token_does_not_hide_the_statistics_of_others():
    none = TokenStats.over(torch.tensor([False]), {"x": torch.tensor([5.0])}, {"m": torch.tensor([5.0])})
    some = TokenStats.over(torch.tensor([True]), {"x": torch.tensor([-2.0])}, {"m": torch.tensor([-2.0])})
    assert (none + some).values() == {"x": -2.0, "m": -2.0}
    assert none.values() == {"x": 0.0, "m": 0.0}
