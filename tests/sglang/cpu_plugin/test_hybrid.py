"""The Qwen3.5-MoE hybrid on the real SGLang, on the CPU: the base, and an adapter on all that SGLang can serve of it.

Its experts share their outer factors, so this is also the test of `experts_shared_outer_loras`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hybrid_models
import pytest
import raw_engine
from own_process import OwnProcess

PROMPTS = [list(range(3, 23)), [7, 300, 12, 12, 5, 90, 41, 8, 1, 2, 260], [9, 10, 11], [4, 2]]
TOLERANCE = 1e-5
LAYOUT = "shared_outer"


@pytest.fixture(scope="module")
def model(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("hybrid"))
    reference.run(hybrid_models.make_hybrid, folder)
    return folder


@pytest.fixture(scope="module")
def engine(
    model: str, reference: OwnProcess, running_engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnProcess]:
    """With the adapter loaded under its layout's name."""
    folder = str(tmp_path_factory.mktemp("adapter"))
    reference.run(hybrid_models.save_hybrid_adapter, model, folder, LAYOUT)
    arguments = {**raw_engine.LORA_ARGUMENTS, **raw_engine.HYBRID_ARGUMENTS, "experts_shared_outer_loras": True}
    with running_engine(Path(model), **arguments) as process:
        assert process.run(raw_engine.load_adapter_in_memory, LAYOUT, folder) is None
        yield process


def gap(answers: list[raw_engine.Answer], reference: OwnProcess, model: str, layout: str | None) -> float:
    sequences = [answer.tokens for answer in answers]
    return raw_engine.largest_gap(answers, reference.run(hybrid_models.hybrid_logprobs, model, sequences, layout))


def test_base_is_exact_in_prefill_and_decode(engine: OwnProcess, reference: OwnProcess, model: str) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS, new_tokens=12)
    assert gap(answers, reference, model, None) <= TOLERANCE


def test_adapter_equals_merged_weights(engine: OwnProcess, reference: OwnProcess, model: str) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS, [LAYOUT] * len(PROMPTS))
    assert gap(answers, reference, model, LAYOUT) <= TOLERANCE
    assert gap(answers, reference, model, None) > 0.1


def test_base_and_adapter_in_one_batch(engine: OwnProcess, reference: OwnProcess, model: str) -> None:
    adapters = [LAYOUT, None, LAYOUT, None]
    answers = engine.run(raw_engine.generate, PROMPTS, adapters)
    for answer, layout in zip(answers, adapters, strict=True):
        assert gap([answer], reference, model, layout) <= TOLERANCE
