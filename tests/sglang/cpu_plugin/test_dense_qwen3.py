"""Dense Qwen3 on the real SGLang, on the CPU: the base and an adapter on every target, against transformers and
PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import raw_engine
import transformers_reference
from own_process import OwnProcess

PROMPTS = [list(range(3, 23)), [7, 300, 12, 12, 5, 90, 41, 8, 1, 2, 260], [9, 10, 11]]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def engine(tiny_qwen3_dir: Path, running_engine: Callable) -> Iterator[OwnProcess]:
    # Chunks of 16 tokens: the first prompt's prefill goes on where its first chunk ended.
    with running_engine(tiny_qwen3_dir, **raw_engine.LORA_ARGUMENTS, chunked_prefill_size=16) as process:
        yield process


@pytest.fixture
def gap(reference: OwnProcess, tiny_qwen3_dir: Path) -> Callable[..., float]:
    """Largest difference between the engine's log-probabilities and the reference's, prompt and output tokens."""

    def measure(answers: list[raw_engine.Answer], adapter: Path | None = None) -> float:
        sequences = [answer.tokens for answer in answers]
        folder = None if adapter is None else str(adapter)
        expected = reference.run(transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences, folder)
        return raw_engine.largest_gap(answers, expected)

    return measure


def test_base_is_exact_in_prefill_and_decode(engine: OwnProcess, gap: Callable[..., float]) -> None:
    answers = engine.run(raw_engine.generate, PROMPTS)
    assert gap(answers) <= TOLERANCE


@pytest.mark.parametrize("load", [raw_engine.load_adapter, raw_engine.load_adapter_in_memory])
def test_adapter_on_every_target_is_peft_s(
    engine: OwnProcess, gap: Callable[..., float], tiny_qwen3_adapter: Path, load: Callable[[str, str], str | None]
) -> None:
    name = load.__name__
    assert engine.run(load, name, str(tiny_qwen3_adapter)) is None
    answers = engine.run(raw_engine.generate, PROMPTS, [name] * len(PROMPTS))
    assert gap(answers, tiny_qwen3_adapter) <= TOLERANCE
    assert gap(answers) > 0.1  # the adapter has an effect, so the comparison says something


def test_base_and_adapter_in_one_batch(engine: OwnProcess, gap: Callable[..., float], tiny_qwen3_adapter: Path) -> None:
    assert engine.run(raw_engine.load_adapter, "mixed", str(tiny_qwen3_adapter)) is None
    with_adapter, base, also = engine.run(raw_engine.generate, PROMPTS, ["mixed", None, "mixed"])
    assert gap([with_adapter, also], tiny_qwen3_adapter) <= TOLERANCE
    assert gap([base]) <= TOLERANCE


def test_a_cached_prefix_is_the_adapters_own(
    engine: OwnProcess, reference: OwnProcess, tiny_qwen3_dir: Path, tiny_qwen3_adapter: Path
) -> None:
    """Keys and values of a prefix hold what the adapter, on the embedding too, made of its tokens; the base's are not
    taken for them."""
    assert engine.run(raw_engine.load_adapter, "prefix", str(tiny_qwen3_adapter)) is None
    prompt = [(7 * step + 100) % 320 for step in range(40)]
    base, first = (engine.run(raw_engine.continue_prompt, prompt, name, 6) for name in (None, "prefix"))
    again = engine.run(raw_engine.continue_prompt, [*prompt[:30], 5, 6], "prefix", 6)
    assert (base.cached, first.cached, again.cached) == (0, 0, 30)
    for answer, adapter in ((base, None), (first, str(tiny_qwen3_adapter)), (again, str(tiny_qwen3_adapter))):
        (expected,) = reference.run(
            transformers_reference.token_logprobs, str(tiny_qwen3_dir), [answer.tokens], adapter
        )
        drawn = zip(answer.output_logprobs, expected[-len(answer.output_logprobs) :], strict=True)
        assert max(abs(ours - theirs) for ours, theirs in drawn) <= TOLERANCE
