"""Whole runs as a user starts them: `lora-grpo train`, alone and under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from started_runs import COMPARED, STEPS, assert_same_run, rows, run_harness
from tiny_model import write_tiny_qwen3

from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_harness(model, tmp_path_factory.mktemp("alone"))


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tp=2", "parallel.sequence_parallel=true"),
        (),
        ("parallel.pp=2", "parallel.micro_batch_size=5"),
    ],
    ids=["tp2+sp", "dp2", "pp2"],
)
def test_a_parallel_run_gives_the_curve_of_one_process(
    model: Path, alone: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """B2: prompts, samples, rewards, metrics and the final adapter do not depend on the topology."""
    output = run_harness(model, tmp_path, *overrides, ranks=2)
    assert_same_run(output, alone, within=1e-4)
    assert [row.get("eval_reward") for row in rows(output)] == [row.get("eval_reward") for row in rows(alone)]


def test_a_run_trains_and_leaves_everything(alone: Path) -> None:
    written = rows(alone)
    assert [row["step"] for row in written] == list(range(STEPS))
    assert all(row["logprob_gap_max"] < 1e-5 for row in written)
    # Published before every step; the evaluation after the third published for the fourth already.
    once = written[0]["bytes_synced"]
    assert [row["bytes_synced"] for row in written] == [once, once, 2 * once, 0, once]
    assert written[0]["kl"] == 0.0 and written[-1]["kl"] > 0
    assert written[-1]["reward"] > written[0]["reward"]
    assert "eval_reward" in written[2] and "eval_reward" not in written[0]
    summary = json.loads((alone / "summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"]
    for name in ("config.toml", "reward.png", "adapter/adapter_config.json", "tensorboard"):
        assert (alone / name).exists(), name


def test_tokens_that_no_batch_had_keep_their_embedding(alone: Path) -> None:
    """As in PEFT, A of the embedding begins at zero: a column moves with its token and not before."""
    tensors = load_file(alone / "adapter" / "adapter_model.safetensors")
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    a, b = tensors[f"{stem}A"], tensors[f"{stem}B"]
    assert a.shape == (4, len(VOCABULARY)) and b.shape == (32, 4)
    moved = a.any(dim=0)
    assert moved.any() and not moved.all() and (a != 0)[:, moved].all()


def test_the_resolved_config_repeats_the_run(model: Path, alone: Path, tmp_path: Path) -> None:
    """Same config, same process count: the same numbers, bit for bit."""
    again = run_harness(model, tmp_path)
    for expected, found in zip(rows(alone), rows(again), strict=True):
        assert {name: found[name] for name in COMPARED} == {name: expected[name] for name in COMPARED}
