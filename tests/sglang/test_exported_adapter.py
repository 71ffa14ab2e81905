"""`lora-plugins export --for sglang`: what the real SGLang makes of the directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import raw_engine
import transformers_reference
from own_process import OwnProcess

from lora_plugins_sdk.offline.export import export_files

PROMPTS = [list(range(3, 23)), [7, 300, 12, 12, 5, 90, 41, 8, 1, 2, 260], [9, 10, 11]]
TARGETS = ["k_proj", "up_proj", "o_proj"]


@pytest.fixture(scope="module")
def partial(reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter on parts of the groups that SGLang computes as one linear."""
    folder = tmp_path_factory.mktemp("partial")
    reference.run(transformers_reference.make_peft_adapter, str(tiny_qwen3_dir), str(folder), targets=TARGETS)
    return folder


@pytest.fixture(scope="module")
def engine(tiny_qwen3_dir: Path, running_engine: Callable) -> Iterator[OwnProcess]:
    with running_engine(tiny_qwen3_dir, **raw_engine.LORA_ARGUMENTS) as process:
        yield process


@pytest.mark.parametrize("size", [None, 4000], ids=["one file", "several files"])
def test_the_engine_answers_as_peft(
    engine: OwnProcess, reference: OwnProcess, tiny_qwen3_dir: Path, partial: Path, tmp_path: Path, size: int | None
) -> None:
    """B28, B30: it refuses or misreads parts of a group as PEFT saves them, and takes the export of the same."""
    report = export_files(partial, tmp_path / "served", form="sglang", base=tiny_qwen3_dir, max_shard_bytes=size)
    assert (len(report.files) > 1) == (size is not None)
    name = f"served-{size}"
    assert engine.run(raw_engine.load_adapter, name, str(tmp_path / "served")) is None
    answers = engine.run(raw_engine.generate, PROMPTS, [name] * len(PROMPTS))
    sequences = [answer.tokens for answer in answers]
    expected = reference.run(transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences, str(partial))
    base = reference.run(transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences)
    assert raw_engine.largest_gap(answers, expected) <= 1e-5
    assert raw_engine.largest_gap(answers, base) > 0.1  # the adapter has an effect, so the comparison says something
