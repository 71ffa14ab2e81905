"""The policy under every topology against one process: curve, gradient norm, adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import VOCAB, write_tiny_qwen3

from lora_harness.batch import DrawnSequence, StepBatch, pack
from lora_harness.config import TrainConfig, parse_config
from lora_harness.losses import loss_normaliser
from lora_harness.trainer import MegatronPolicy
from lora_plugins_sdk.testing import Layout, current_run, run_world

STEPS, LEARNING_RATE = 3, 1e-2
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(dp=2),
    Layout(pp=2),
    Layout(tp=2, dp=2, sequence_parallel=True),
]


def _config(model: Path, layout: Layout) -> TrainConfig:
    return parse_config(
        {
            "model": {"path": str(model)},
            "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
            "steps": STEPS,
            "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["all-linear", "embed_tokens", "lm_head"]},
            "parallel": {
                "tp": layout.tp,
                "pp": layout.pp,
                "sequence_parallel": layout.sequence_parallel,
                "micro_batch_size": 2,
            },
            "algorithm": {"kl_coef": 0.1, "minibatches": 2},
        }
    )


def _batch(multiple: int) -> StepBatch:
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    sequences = [DrawnSequence(tokens(3 + i % 3), tokens(2 + i % 4), [-2.0] * (2 + i % 4)) for i in range(9)]
    advantages = torch.randn(len(sequences), generator=generator)
    return pack(sequences, advantages, pad_id=0, multiple=multiple, device=torch.device("cpu"))


def train_some_steps(model: Path, layout: Layout) -> dict[str, Any]:
    """Three steps of two updates each; the second update of a step sees a ratio that is not 1."""
    policy = MegatronPolicy(_config(model, layout), current_run())
    batch = _batch(multiple=layout.tp)
    curve = []
    for _ in range(STEPS):
        reference = policy.logprobs(batch, reference=True)
        old = policy.logprobs(batch, reference=False)
        for rows in ([0, 3, 4, 7], [1, 2, 5, 6, 8]):
            report = policy.update(
                batch,
                rows,
                normaliser=loss_normaliser("token", [batch.lengths[row] for row in rows], 8),
                lr=LEARNING_RATE,
                ref_logprobs=reference,
                old_logprobs=old,
            )
            curve.append({"grad_norm": report.grad_norm, **report.stats.values()})
    return {"curve": curve, "adapter": dict(policy.export().tensors)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    """One process."""
    return run_world(train_some_steps, Layout(), model, Layout())[0]


@pytest.mark.world
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_topology_changes_nothing(model: Path, alone: dict[str, Any], layout: Layout) -> None:
    """B2, B12, B13: same metrics, gradient norm counted once, same adapter; every rank reports the same."""
    ranks = run_world(train_some_steps, layout, model, layout)
    for rank in ranks:
        assert rank["curve"] == ranks[0]["curve"]
        for name, tensor in rank["adapter"].items():
            assert torch.equal(tensor, ranks[0]["adapter"][name]), name
    for expected, found in zip(alone["curve"], ranks[0]["curve"], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    # Adam makes of a gradient's rounding, where the gradient is nearly zero, a share of the learning rate: 1 % of it.
    for name, tensor in alone["adapter"].items():
        torch.testing.assert_close(ranks[0]["adapter"][name], tensor, atol=0.01 * LEARNING_RATE, rtol=0)


def test_the_curve_moves(alone: dict[str, Any]) -> None:
    """Agreement means something only if the adapter trains and the ratio leaves 1."""
    first, *_, last = alone["curve"]
    assert first["kl"] == 0.0
    assert last["kl"] > 1e-4
    assert alone["curve"][1]["approx_kl"] > 0
    assert first["grad_norm"] > 0
