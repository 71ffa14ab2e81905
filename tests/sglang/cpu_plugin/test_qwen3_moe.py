"""Qwen3-MoE on the real SGLang, on the CPU: the base, adapters on attention and routed experts in two layouts, and the
plugin's own export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import moe_models
import pytest
import raw_engine
from own_process import OwnProcess

from lora_plugins_sdk import write_adapter
from lora_plugins_sdk.offline.export import export_files
from lora_plugins_sdk.offline.merge import merge, plan_merge
from lora_plugins_sdk.testing.conformance.problem import make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.subject import Subject

PROMPTS = [list(range(3, 23)), [7, 300, 12, 12, 5, 90, 41, 8, 1, 2, 260], [9, 10, 11]]
TOLERANCE = 1e-5
LAYOUTS = ("per_expert", "packed")


@pytest.fixture(scope="module")
def model(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("qwen3_moe"))
    reference.run(moe_models.make_qwen3_moe, folder)
    return folder


@pytest.fixture(scope="module")
def engine(
    model: str, reference: OwnProcess, running_engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnProcess]:
    """With one adapter of each layout, loaded under its layout's name."""
    with running_engine(Path(model), **raw_engine.LORA_ARGUMENTS) as process:
        for layout in LAYOUTS:
            folder = str(tmp_path_factory.mktemp(layout))
            reference.run(moe_models.save_qwen3_moe_adapter, model, folder, layout)
            assert process.run(raw_engine.load_adapter_in_memory, layout, folder) is None
        yield process


def gap(answers: list[raw_engine.Answer], reference: OwnProcess, model: str, layout: str | None) -> float:
    sequences = [answer.tokens for answer in answers]
    return raw_engine.largest_gap(answers, reference.run(moe_models.qwen3_moe_logprobs, model, sequences, layout))


def test_base_is_exact(engine: OwnProcess, reference: OwnProcess, model: str) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS)
    assert gap(answers, reference, model, None) <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapter_on_experts_equals_merged_weights(
    engine: OwnProcess, reference: OwnProcess, model: str, layout: str
) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS, [layout] * len(PROMPTS))
    assert gap(answers, reference, model, layout) <= TOLERANCE
    assert gap(answers, reference, model, None) > 0.1


def test_two_adapters_and_the_base_in_one_batch(engine: OwnProcess, reference: OwnProcess, model: str) -> None:
    adapters = ["packed", None, "per_expert"]
    answers = engine.run(raw_engine.generate, PROMPTS, adapters)
    for answer, layout in zip(answers, adapters, strict=True):
        assert gap([answer], reference, model, layout) <= TOLERANCE


def test_many_tokens_of_one_adapter_in_a_batch(engine: OwnProcess, reference: OwnProcess, model: str) -> None:
    # Neighbours with the same adapter become one segment; together they are longer than a block of the GPU kernel.
    prompts = [[(7 * row + 3 * step) % 320 for step in range(150)] for row in range(3)]
    answers = engine.run(raw_engine.generate, prompts, ["packed"] * 3, new_tokens=2)
    assert gap(answers, reference, model, "packed") <= TOLERANCE


def test_the_plugins_export_equals_its_merged_weights(
    engine: OwnProcess, reference: OwnProcess, model: str, tmp_path: Path
) -> None:
    """On all that SGLang serves, the embedding and the head too, as a run exports it and the engine takes it."""
    subject, targets = Subject.of("qwen3_moe", hf_config=model), ("all-linear", "embed_tokens", "lm_head")
    adapter = peft_adapter(subject, make_problem(subject, target_modules=targets).factors, target_modules=targets)
    policy = write_adapter(adapter, tmp_path / "policy")
    merge(plan_merge(Path(model), policy, tmp_path / "merged"))
    export_files(policy, tmp_path / "served", form="sglang", base=Path(model))
    assert engine.run(raw_engine.load_adapter_in_memory, "exported", str(tmp_path / "served")) is None
    answers = engine.run(raw_engine.generate, PROMPTS, ["exported"] * len(PROMPTS))
    sequences = [answer.tokens for answer in answers]
    merged = reference.run(moe_models.qwen3_moe_logprobs, str(tmp_path / "merged"), sequences, None)
    assert raw_engine.largest_gap(answers, merged) <= TOLERANCE
    assert gap(answers, reference, model, None) > 0.1
