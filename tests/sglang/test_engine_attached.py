"""Servers that run already: found by URL, checked, shared by the ranks of a run, left running when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers_reference
from own_process import OwnProcess
from rollout_runs import gap, opened, policy, requests, run_config, sequences
from sync_engines import LORA_ARGUMENTS, Engines

from lora_harness.engines import Completion
from lora_plugins_sdk import write_adapter
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing import Layout, run_world

# Starting an engine takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def engines(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tiny_qwen3_dir, tmp_path_factory.mktemp("logs"), **LORA_ARGUMENTS) as started:
        yield started


@pytest.fixture(autouse=True)
def free_engine(engines: Engines) -> Iterator[None]:
    """Leave no policy of one test on the engine for the next."""
    yield
    client = engines.group.clients[0]
    for name in client.loaded_adapters():
        client.unload_adapter(name)


def url(engines: Engines) -> str:
    return engines.servers[0].url


def test_a_server_is_used_as_it_is_and_left_running(engines: Engines, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    run = run_config(tiny_qwen3_dir, tmp_path, mode="adapter", sglang={"urls": [url(engines)]})
    engine = opened(run)
    first = policy(tiny_qwen3_dir, 1)
    engine.publish(1, first.tensors, first.config)
    assert {one.adapter_version for one in engine.generate(requests(samples=1))} == {1}
    engine.close()
    with pytest.raises(LoraError, match="it was closed"):
        engine.generate(requests(samples=1))
    assert engines.group.clients[0].healthy()


def test_a_server_that_does_not_fit_is_refused_with_all_it_lacks(
    engines: Engines, tiny_qwen3_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(LoraError, match="was started with LoRA, which keeps full weights from being replaced"):
        opened(run_config(tiny_qwen3_dir, tmp_path, mode="merge", sglang={"urls": [url(engines)]}))
    with pytest.raises(LoraError, match=r"holds 3 adapters in a batch.* --max-loras-per-batch 5"):
        opened(run_config(tiny_qwen3_dir, tmp_path, mode="adapter", sglang={"urls": [url(engines)], "keep": 4}))
    with pytest.raises(LoraError, match=r"engine http://127\.0\.0\.1:9: does not answer"):
        opened(run_config(tiny_qwen3_dir, tmp_path, mode="adapter", sglang={"urls": ["http://127.0.0.1:9"]}))


def test_train_only_keeps_rollouts_on_the_base(
    engines: Engines, reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path: Path
) -> None:
    engine = opened(run_config(tiny_qwen3_dir, tmp_path, train_only=True, sglang={"urls": [url(engines)]}))
    asked = requests()
    drawn = engine.generate(asked)
    expected = reference.run(transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn))
    assert gap(asked, drawn, expected) <= 1e-5 and {one.adapter_version for one in drawn} == {0}


def on_a_rank(model: str, output: str, at: str) -> tuple[int, list[Completion], str]:
    """One rank of a run: publish, draw its share, publish something broken."""
    engine = opened(run_config(Path(model), Path(output), mode="adapter", sglang={"urls": [at]}))
    first = policy(Path(model), 1)
    sent = engine.publish(1, first.tensors, first.config)
    rank = torch.distributed.get_rank()
    drawn = engine.generate(requests()[rank::2])
    broken = {name: one * float("inf") for name, one in first.tensors.items()}
    try:
        engine.publish(2, broken, first.config)
    except LoraError as error:
        return sent, drawn, str(error)
    return sent, drawn, ""


def test_every_rank_sends_its_own_requests_and_hears_the_same(
    engines: Engines, reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path: Path
) -> None:
    """Rank 0 publishes; what it meets is heard by all."""
    ranks = run_world(on_a_rank, Layout(dp=2), str(tiny_qwen3_dir), str(tmp_path), url(engines))
    assert [one[0] for one in ranks] == [policy(tiny_qwen3_dir, 1).num_bytes] * 2
    assert "holds NaN or infinite values" in ranks[0][2] and ranks[0][2] == ranks[1][2]
    asked = requests()
    drawn: list[Completion] = [ranks[index % 2][1][index // 2] for index in range(len(asked))]
    write_adapter(policy(tiny_qwen3_dir, 1), tmp_path / "v1")
    expected = reference.run(
        transformers_reference.token_logprobs,
        str(tiny_qwen3_dir),
        sequences(asked, drawn),
        str(tmp_path / "v1"),
    )
    assert gap(asked, drawn, expected) <= 1e-5 and {one.adapter_version for one in drawn} == {1}
