"""Whole runs of a hybrid with experts: alone, with experts spread over ranks, and on transformers with real PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
from started_runs import assert_same_run, rows, run_harness
from tiny_model import write_tiny_hybrid

from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer

STEPS = 3
SHORT = ('lora.target_modules=["all-linear", "embed_tokens", "router"]', f"steps={STEPS}", "eval.every=0")
pytestmark = [pytest.mark.world, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_harness(model, tmp_path_factory.mktemp("alone"), *SHORT)


def test_the_local_engine_samples_the_policy_that_is_trained(alone: Path) -> None:
    """B31: real PEFT has every factor of the fused experts, or its log-probabilities would differ."""
    written = rows(alone)
    assert [row["step"] for row in written] == list(range(STEPS))
    assert max(row["logprob_gap_max"] for row in written) <= 1e-4


@pytest.mark.parametrize(
    "overrides", [("parallel.ep=2",), ("parallel.tp=2", "parallel.etp=1", "parallel.sequence_parallel=true")]
)
def test_experts_over_ranks_give_the_curve_of_one_process(
    model: Path, alone: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """B6: with an expert tensor parallel size other than TP the experts' gradients have a group of their own."""
    output = run_harness(model, tmp_path, *SHORT, *overrides, ranks=2)
    assert_same_run(output, alone)
