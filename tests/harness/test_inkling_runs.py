"""Whole runs of Inkling on transformers with real PEFT: alone, and under tensor and expert parallelism together."""

from __future__ import annotations

from pathlib import Path

import pytest
from started_runs import assert_same_run, rows, run_harness
from tiny_model import write_tiny_inkling

from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer

STEPS = 3
SHORT = (
    'lora.target_modules=["all-linear", "embed_tokens", "lm_head"]',
    "lora.expert_sharing=outer",
    f"steps={STEPS}",
    "eval.every=0",
    "rollout.max_logprob_gap=1e-4",
)
SPLIT = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=1", "parallel.sequence_parallel=true")
pytestmark = [pytest.mark.world, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_inkling(tmp_path_factory.mktemp("inkling"), vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_harness(model, tmp_path_factory.mktemp("alone"), *SHORT)


def test_the_local_engine_samples_the_policy_that_is_trained(alone: Path) -> None:
    """B31: real PEFT has every factor of experts, stacks and the padded head, or its log-probabilities would differ."""
    written = rows(alone)
    assert [row["step"] for row in written] == list(range(STEPS))
    assert max(row["logprob_gap_max"] for row in written) <= 1e-4
    assert min(row["grad_norm"] for row in written) > 0


def test_tensor_and_expert_parallel_ranks_give_the_curve_of_one_process(
    model: Path, alone: Path, tmp_path: Path
) -> None:
    output = run_harness(model, tmp_path, *SHORT, *SPLIT, ranks=2)
    assert max(row["logprob_gap_max"] for row in rows(output)) <= 1e-4
    assert_same_run(output, alone)
