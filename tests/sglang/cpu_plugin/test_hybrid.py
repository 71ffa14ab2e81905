"""The Qwen3.5-MoE hybrid on the real SGLang, on the CPU: the base, and an adapter on all that SGLang can serve of it.

A text checkpoint with experts that share their outer factors, and a multimodal one with factors of each expert.
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


@pytest.fixture(
    scope="module",
    params=[(hybrid_models.make_hybrid, "shared_outer"), (hybrid_models.make_multimodal_hybrid, "per_expert")],
    ids=["text", "multimodal"],
)
def case(
    request: pytest.FixtureRequest, reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """Folder of the model, and layout of its adapter's experts."""
    make, layout = request.param
    folder = str(tmp_path_factory.mktemp("hybrid"))
    reference.run(make, folder)
    return folder, layout


@pytest.fixture(scope="module")
def engine(
    case: tuple[str, str], reference: OwnProcess, running_engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnProcess]:
    """With the adapter loaded under its layout's name."""
    model, layout = case
    folder = str(tmp_path_factory.mktemp("adapter"))
    reference.run(hybrid_models.save_hybrid_adapter, model, folder, layout)
    arguments = {**raw_engine.LORA_ARGUMENTS, **raw_engine.HYBRID_ARGUMENTS}
    arguments["experts_shared_outer_loras"] = layout == "shared_outer"
    # Chunks of 16 tokens: the first prompt's prefill goes on from the state that its first chunk left.
    with running_engine(Path(model), **arguments, enable_multimodal=False, chunked_prefill_size=16) as process:
        assert process.run(raw_engine.load_adapter_in_memory, layout, folder) is None
        yield process


def gap(answers: list[raw_engine.Answer], reference: OwnProcess, model: str, layout: str | None) -> float:
    sequences = [answer.tokens for answer in answers]
    return raw_engine.largest_gap(answers, reference.run(hybrid_models.hybrid_logprobs, model, sequences, layout))


def test_base_is_exact_in_prefill_and_decode(engine: OwnProcess, reference: OwnProcess, case: tuple[str, str]) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS, new_tokens=12)
    assert gap(answers, reference, case[0], None) <= TOLERANCE


def test_adapter_equals_merged_weights(engine: OwnProcess, reference: OwnProcess, case: tuple[str, str]) -> None:
    model, layout = case
    answers = engine.run(raw_engine.generate, PROMPTS, [layout] * len(PROMPTS))
    assert gap(answers, reference, model, layout) <= TOLERANCE
    assert gap(answers, reference, model, None) > 0.1


def test_base_and_adapter_in_one_batch(engine: OwnProcess, reference: OwnProcess, case: tuple[str, str]) -> None:
    model, layout = case
    adapters = [layout, None, layout, None]
    answers = engine.run(raw_engine.generate, PROMPTS, adapters)
    for answer, name in zip(answers, adapters, strict=True):
        assert gap([answer], reference, model, name) <= TOLERANCE
