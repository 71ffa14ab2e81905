"""A sync is skipped when no factor moved on any rank, and every rank decides alike."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpointed_run import config_of, rows, train, write_model
from test_checkpoint_resume import cut_off
from tiny_model import write_tiny_qwen3

from lora_harness.config import TrainConfig, parse_config
from lora_harness.trainer import MegatronPolicy
from lora_plugins_sdk.testing import Layout, current_run, run_world


def _config(model: Path, layout: Layout) -> TrainConfig:
    return parse_config(
        {
            "model": {"path": str(model)},
            "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
            "steps": 1,
            "lora": {"rank": 4, "alpha": 8.0},
            "parallel": {"tp": layout.tp, "pp": layout.pp},
        }
    )


def changes_seen(model: Path, layout: Layout, mover: int) -> list[tuple[float, int]]:
    """What this rank hears when rank `mover` alone changes a factor, and how many collectives each answer took."""
    policy = MegatronPolicy(_config(model, layout), current_run())
    first = policy.published._parameters[0]
    calls = 0
    reduce = dist.all_reduce

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return reduce(*args, **kwargs)

    def heard(change: float = 0.0) -> tuple[float, int]:
        nonlocal calls
        calls = 0
        with torch.no_grad():
            if dist.get_rank() == mover:
                first.view(-1)[0] += change
            with patch.object(dist, "all_reduce", counted):
                return policy.published.largest_change(), calls

    with torch.no_grad():
        for one in policy.published._parameters:
            one.zero_()
    found = [heard()]
    policy.published.remember()
    found += [heard(), heard(6e-7), heard(6e-7)]
    policy.published.remember()
    found += [heard(), heard(math.nan)]
    policy.published.forget()
    return [*found, heard()]


@pytest.mark.world
@pytest.mark.parametrize(
    ("layout", "mover"),
    [(Layout(), 0), (Layout(tp=2), 1), (Layout(pp=2), 1), (Layout(dp=2), 1)],
    ids=lambda value: str(value),
)
def test_every_rank_hears_the_largest_change_of_any(tmp_path: Path, layout: Layout, mover: int) -> None:
    """Changes since the last published version add up, NaN never counts as small, and it is one collective."""
    ranks = run_world(changes_seen, layout, write_tiny_qwen3(tmp_path / "model"), layout, mover)
    for found in ranks:
        values = [change for change, _ in found]
        assert values == [math.inf, 0.0, pytest.approx(6e-7), pytest.approx(1.2e-6), 0.0, math.inf, math.inf]
        assert {calls for _, calls in found} == {1}


@pytest.mark.slow
def test_skipped_syncs_are_counted_and_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    """With a bound that nothing reaches only the first sync and those after a checkpoint happen; resuming changes no
    row. The local engine stands for any: the option itself belongs to engines that are sent something."""
    model, output = write_model(tmp_path / "model"), tmp_path / "run"
    config = config_of(model, output)
    object.__setattr__(config.rollout, "delta_skip", 100.0)
    run_world(train, Layout(), config)
    written = rows(output)
    once = written[0]["bytes_synced"]
    assert once > 0
    assert [row["bytes_synced"] for row in written] == [once, 0, 0, once, 0, 0]
    # Every third step also publishes for its evaluation.
    assert [row["syncs_skipped"] for row in written] == [0, 1, 2, 0, 1, 2]
    assert [row["adapter_version"] for row in written] == [1, 1, 1, 2, 2, 2]
    again = cut_off(output, tmp_path / "again")
    resumed = config_of(model, again)
    object.__setattr__(resumed.rollout, "delta_skip", 100.0)
    run_world(train, Layout(), resumed, "auto")
    assert rows(again) == written
