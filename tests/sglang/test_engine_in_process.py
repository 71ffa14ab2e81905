"""The engine inside the trainer's process: the same values as through a server, and a death that is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import in_process_runs
import pytest
import rollout_references
import transformers_reference
from own_process import OwnProcess
from rollout_runs import gap, policy, requests, sequences
from sync_engines import PROMPTS

from lora_plugins_sdk import write_adapter

# Starting an engine takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def process(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnProcess]:
    output = tmp_path_factory.mktemp("run")
    with OwnProcess() as started:
        said = started.run(in_process_runs.start, str(tiny_qwen3_dir), str(output))
        assert said[0] == f"starting SGLang in this process; log: {output}/sglang/engine-0.log"
        yield started
        started.run(in_process_runs.stop)


@pytest.fixture(scope="module")
def adapter(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("adapter") / "v1"
    write_adapter(policy(tiny_qwen3_dir, 1), folder)
    return str(folder)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_are_pefts(
    process: OwnProcess, reference: OwnProcess, tiny_qwen3_dir: Path, adapter: str, temperature: float
) -> None:
    asked = requests(temperature=temperature)
    drawn = process.run(in_process_runs.draw, temperature=temperature)
    assert {one.adapter_version for one in drawn} == {1}
    expected = reference.run(
        rollout_references.tempered_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn), temperature, adapter
    )
    assert gap(asked, drawn, expected) <= 1e-5


def test_greedy_completions_are_the_local_engines(
    process: OwnProcess, reference: OwnProcess, tiny_qwen3_dir: Path, adapter: str
) -> None:
    drawn = process.run(in_process_runs.draw, temperature=0.0, samples=1, new_tokens=12)
    local = reference.run(rollout_references.local_greedy, str(tiny_qwen3_dir), PROMPTS, 12, adapter)
    assert [one.token_ids for one in drawn] == [tokens for tokens, _ in local]


def test_weights_are_replaced_and_stamped(
    process: OwnProcess, reference: OwnProcess, tiny_qwen3_dir: Path, adapter: str
) -> None:
    assert process.run(in_process_runs.replace_weights, str(tiny_qwen3_dir)) == ("b", 1, 0)
    asked = requests(samples=1)
    drawn = process.run(in_process_runs.draw, samples=1)
    expected = reference.run(
        transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn), adapter
    )
    assert gap(asked, drawn, expected) <= 1e-5


def test_a_dead_engine_is_told_and_the_process_lives_on(process: OwnProcess) -> None:
    """SGLang would kill the process that called it. Runs last: nothing is served afterwards."""
    told = process.run(in_process_runs.kill_and_draw)
    assert "lost one of its processes during" in told and "engine-0.log" in told
