"""Rollouts through the harness's engine on a launched server: values, temperature, stop tokens, seeds, limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import rollout_references
import torch
import transformers_reference
from engine_processes import prefills
from own_process import OwnProcess
from rollout_runs import gap, opened, policy, requests, run_config, sequences, servers_of
from sync_engines import PROMPTS

from lora_harness.engines import Completion, GenerationRequest, RolloutEngine
from lora_harness.engines.sglang.client import SglangRequest
from lora_harness.engines.sglang.engine import SglangEngine
from lora_harness.engines.sglang.http import HttpClient
from lora_plugins_sdk import write_adapter
from lora_plugins_sdk.errors import LoraError

# Starting an engine takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def engine(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> Iterator[SglangEngine]:
    """A run in adapter mode that has published version 3."""
    started = opened(run_config(tiny_qwen3_dir, tmp_path_factory.mktemp("run"), mode="adapter"), said)
    try:
        first = policy(tiny_qwen3_dir, 3)
        started.publish(3, first.tensors, first.config)
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def adapter(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("adapter") / "v3"
    write_adapter(policy(tiny_qwen3_dir, 3), folder)
    return str(folder)


def client_of(engine: SglangEngine) -> HttpClient:
    client = engine._group.clients[0]
    assert isinstance(client, HttpClient)
    return client


def test_it_is_a_rollout_engine_that_says_what_it_serves(engine: SglangEngine, said: list[str]) -> None:
    assert isinstance(engine, RolloutEngine)
    assert (engine.capabilities.name, engine.capabilities.mode, engine.capabilities.max_rank) == (
        "sglang",
        "adapter",
        4,
    )
    assert said[0].startswith("starting 1 SGLang engine; log: ") and "serves http://127.0.0.1:" in said[1]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_sampled_logprobs_are_those_of_the_distribution_drawn_from(
    engine: SglangEngine, reference: OwnProcess, tiny_qwen3_dir: Path, adapter: str, temperature: float
) -> None:
    """B37: every sample carries the version that made it, and its values are that version's."""
    asked = requests(temperature=temperature)
    drawn = engine.generate(asked)
    assert {one.adapter_version for one in drawn} == {3}
    expected = reference.run(
        rollout_references.tempered_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn), temperature, adapter
    )
    assert gap(asked, drawn, expected) <= 1e-5
    base = reference.run(transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn))
    assert gap(asked, drawn, base) > 0.1, "the adapter has no effect"


def test_greedy_completions_are_the_local_engines(
    engine: SglangEngine, reference: OwnProcess, tiny_qwen3_dir: Path, adapter: str
) -> None:
    """Tokens equal, and log-probabilities at temperature 1."""
    drawn = engine.generate(requests(temperature=0.0, samples=1, new_tokens=12))
    local = reference.run(rollout_references.local_greedy, str(tiny_qwen3_dir), PROMPTS, 12, adapter)
    for mine, (tokens, logprobs) in zip(drawn, local, strict=True):
        assert mine.token_ids == tokens
        assert max(abs(a - b) for a, b in zip(mine.logprobs, logprobs, strict=True)) <= 1e-5


def test_a_stop_token_ends_a_completion_and_is_its_last(engine: SglangEngine) -> None:
    whole = engine.generate(requests(temperature=0.0, samples=1, new_tokens=12))
    assert all(one.finish_reason == "length" and len(one.token_ids) == 12 for one in whole)
    stops = {one.token_ids[2] for one in whole}
    stopped = engine.generate(requests(temperature=0.0, samples=1, new_tokens=12, stops=tuple(stops)))
    for full, cut in zip(whole, stopped, strict=True):
        first = next(index for index, token in enumerate(full.token_ids) if token in stops)
        assert cut.token_ids == full.token_ids[: first + 1] and cut.finish_reason == "stop"
        assert len(cut.logprobs) == first + 1


def test_a_seed_decides_whatever_shares_its_batch(engine: SglangEngine) -> None:
    """On a CPU the plugin keeps the seeds of requests."""
    asked = requests(samples=6)
    first = engine.generate(asked)
    again = engine.generate(asked[::-2])
    assert [one.token_ids for one in again] == [one.token_ids for one in first[::-2]]
    of_one_prompt = {one.token_ids for one in first[:6]}
    assert len(of_one_prompt) > 3, "samples of one prompt must differ"
    other = engine.generate([replace(one, seed=one.seed + 2**40) for one in asked])
    assert [one.token_ids for one in other] != [one.token_ids for one in first]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt_ids": ()}, "request 1: the prompt has no tokens"),
        ({"prompt_ids": (320,)}, "outside the vocabulary of 320"),
        ({"prompt_ids": (1,) * 510}, "510 prompt tokens and 8 new ones need 518 positions"),
        ({"seed": -1}, "seed -1 is out of range"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_it_is_sent(
    engine: SglangEngine, changes: dict[str, object], message: str
) -> None:
    good = requests(samples=1)[0]
    with pytest.raises(LoraError, match=message):
        engine.generate([good, replace(good, **changes)])
    assert len(engine.generate([good])) == 1


def test_an_aborted_completion_is_an_error_that_counts_its_tokens(engine: SglangEngine) -> None:
    told: list[BaseException | list[Completion]] = []

    def draw() -> None:
        try:
            told.append(engine.generate(requests(samples=1, new_tokens=480)))
        except BaseException as error:
            told.append(error)

    [server] = servers_of(engine)
    before = prefills(server.log)
    thread = threading.Thread(target=draw)
    thread.start()
    while prefills(server.log) == before:
        assert thread.is_alive()
        time.sleep(0.01)
    while thread.is_alive():
        client_of(engine).abort()
        thread.join(0.05)
    assert isinstance(told[0], LoraError), told
    assert "was aborted on the engine after" in str(told[0])


def test_a_call_that_takes_too_long_is_aborted_on_the_engine(engine: SglangEngine) -> None:
    hurried = HttpClient(client_of(engine).name, timeout=0.3)
    asked = [
        SglangRequest(rid=f"slow-{number}", prompt_ids=one.prompt_ids, sampling=one.sampling, seed=one.seed)
        for number, one in enumerate(requests(samples=3, new_tokens=480))
    ]
    with pytest.raises(LoraError, match=r"9 completions were not there after 0\.3 s and were aborted.*timeout"):
        hurried.generate(asked)
    hurried.close()
    # What was aborted keeps no slot: a short call is answered long before 480 tokens could have been drawn.
    assert len(engine.generate(requests(samples=1, new_tokens=1))) == 3


def test_a_refused_policy_leaves_the_old_one_serving(
    engine: SglangEngine, tiny_qwen3_dir: Path, reference: OwnProcess, adapter: str
) -> None:
    broken = policy(tiny_qwen3_dir, 4)
    name = next(iter(broken.tensors))
    tensors = {**broken.tensors, name: torch.full_like(broken.tensors[name], float("nan"))}
    with pytest.raises(LoraError, match="holds NaN or infinite values"):
        engine.publish(4, tensors, broken.config)
    assert engine.adapter_version == 3
    asked: list[GenerationRequest] = requests(samples=1)
    drawn = engine.generate(asked)
    expected = reference.run(
        transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn), adapter
    )
    assert gap(asked, drawn, expected) <= 1e-5 and {one.adapter_version for one in drawn} == {3}
