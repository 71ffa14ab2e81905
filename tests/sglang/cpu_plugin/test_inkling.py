"""Inkling on the real SGLang, on the CPU: the base, and an adapter on all that SGLang can serve of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import inkling_models
import pytest
import raw_engine
import torch
from own_process import OwnProcess

from lora_sglang_cpu.inkling_experts import routed_experts

PROMPTS = [list(range(3, 23)), [7, 299, 12, 12, 5, 90, 41, 8, 1, 2, 260], [9, 10, 11], [4, 2]]
LONG = [(7 * step + 3) % 300 for step in range(140)]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("inkling"))
    reference.run(inkling_models.make_inkling, folder)
    return folder


@pytest.fixture(scope="module")
def engine(
    model: str, reference: OwnProcess, running_engine: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnProcess]:
    """With an adapter under the name `shared_outer`, on every target."""
    folder = str(tmp_path_factory.mktemp("adapter"))
    reference.run(inkling_models.save_inkling_adapter, folder, "shared_outer")
    arguments = {**raw_engine.LORA_ARGUMENTS, **raw_engine.INKLING_ARGUMENTS}
    arguments["lora_target_modules"] = inkling_models.TARGETS
    arguments["mamba_track_interval"] = 64  # while tokens are drawn, a snapshot of the states after so many
    with running_engine(Path(model), **arguments, experts_shared_outer_loras=True) as process:
        assert process.run(raw_engine.load_adapter_in_memory, "shared_outer", folder) is None
        yield process


def gap(answers: Sequence[raw_engine.Answer], reference: OwnProcess, model: str, layout: str | None) -> float:
    sequences = [answer.tokens for answer in answers]
    return raw_engine.largest_gap(answers, reference.run(inkling_models.inkling_logprobs, model, sequences, layout))


@pytest.mark.parametrize("adapters", [[None] * 4, ["shared_outer"] * 4, ["shared_outer", None] * 2])
def test_base_and_adapter_are_exact_in_prefill_and_decode(
    engine: OwnProcess, reference: OwnProcess, model: str, adapters: list[str | None]
) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS, adapters, new_tokens=12)
    for answer, name in zip(answers, adapters, strict=True):
        assert gap([answer], reference, model, name) <= TOLERANCE
        assert name is None or gap([answer], reference, model, None) > 0.1


@pytest.mark.parametrize("adapter", [None, "shared_outer"])
def test_a_cached_prefix_goes_on_from_its_snapshot(
    engine: OwnProcess, reference: OwnProcess, model: str, adapter: str | None
) -> None:
    """Of a prompt the last multiple of 64 tokens is kept, and every one of what was drawn."""
    first = engine.run(raw_engine.continue_prompt, LONG, adapter, 80)
    again = engine.run(raw_engine.continue_prompt, [*LONG[:130], 5, 6], adapter, 12)
    later = engine.run(raw_engine.continue_prompt, [*first.tokens, 9, 9], adapter, 12)
    assert (first.cached, again.cached, later.cached) == (0, 128, 192)
    for answer in (first, again, later):
        (expected,) = reference.run(inkling_models.inkling_logprobs, model, [answer.tokens], adapter)
        drawn = zip(answer.output_logprobs, expected[-len(answer.output_logprobs) :], strict=True)
        assert max(abs(ours - theirs) for ours, theirs in drawn) <= TOLERANCE


def test_without_adapters_weights_lie_as_published_and_answers_are_as_exact(
    running_engine: Callable, reference: OwnProcess, model: str
) -> None:
    with running_engine(Path(model), **raw_engine.INKLING_ARGUMENTS, chunked_prefill_size=64) as process:
        answers = process.run(raw_engine.generate, [*PROMPTS, LONG], new_tokens=12)
    assert gap(answers, reference, model, None) <= TOLERANCE


def test_a_dropped_route_adds_nothing() -> None:
    """SGLang marks it by a negative expert; as an index that is the last one."""
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    weights = torch.rand(3, 2)
    kept = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    routes = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    dropped = torch.where(kept.bool(), routes, -1)
    expected = routed_experts(x, weights * kept, routes, w13, w2)
    assert torch.allclose(routed_experts(x, weights, dropped, w13, w2), expected)
    assert not expected[2].any() and expected[:2].any(1).all()
