"""Servers of the real SGLang for the tests of synchronisation, adapters for them, and PEFT's word on the answers."""

from __future__ import annotations

import itertools
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raw_engine
import torch
import transformers_reference
from own_process import OwnProcess
from torch import Tensor

from lora_harness.engines.base import SamplingParams
from lora_harness.engines.sglang.client import SglangClient, SglangCompletion, SglangRequest
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.server import SglangServer
from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.package import LoraSettings
from lora_plugins_sdk import PeftAdapter, write_adapter
from lora_plugins_sdk.peft_names import factor_name
from lora_plugins_sdk.weight_files import read_weight_files

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
SETTINGS = LoraSettings(
    targets=frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"}),
    max_rank=8,
    slots=3,
)
LORA_ARGUMENTS: dict[str, Any] = dict(
    enable_lora=True,
    lora_backend="torch_native",
    max_lora_rank=SETTINGS.max_rank,
    max_loras_per_batch=SETTINGS.slots,
    lora_target_modules=sorted(SETTINGS.targets),
)
PROMPTS = ((5, 17, 3, 99, 250), (7, 8, 9), (311, 2, 45, 45, 45, 1, 0, 12, 200))


class Engines:
    """Servers of one model that can be killed and started again.

    Args:
        model: HF directory.
        logs: where their logs go.
        count: how many.
        arguments: of SGLang, beside those that a CPU needs.
    """

    def __init__(self, model: Path, logs: Path, count: int = 1, **arguments: Any) -> None:
        # SGLang gives up a warm-up that is not through in two minutes, which a busy machine takes for a start.
        self._arguments = {
            "model_path": str(model),
            "skip_server_warmup": True,
            **raw_engine.CPU_ARGUMENTS,
            **arguments,
        }
        self._logs = logs
        self.servers: list[SglangServer] = []
        self.said: list[str] = []
        for index in range(count):
            self.servers.append(self._server(index))
        self.group = EngineGroup(
            [self._ready(index) for index in range(count)], restart=self._restart, say=self.said.append
        )

    def kill(self, index: int) -> None:
        """SIGKILL for every process of one engine."""
        os.killpg(self.servers[index].pid, signal.SIGKILL)

    def trap(self, index: int, wrap: Callable[[SglangClient], Any]) -> None:
        """Put something in the place of one client, until its engine is started again."""
        self.group._clients[index] = wrap(self.group.clients[index])

    def close(self) -> None:
        for client in self.group.clients:
            client.close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _server(self, index: int) -> SglangServer:
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        return SglangServer(self._arguments, log=self._logs / f"engine{index}.log", environment=environment)

    def _ready(self, index: int) -> HttpClient:
        server = self.servers[index]
        client = HttpClient(server.url, server=server, timeout=120.0)
        server.wait_until_ready(client.healthy, timeout=900.0)
        return client

    def _restart(self, index: int) -> SglangClient:
        self.servers[index] = self._server(index)
        return self._ready(index)


def random_adapter(model: Path, seed: int, targets: Sequence[str] = TARGETS, rank: int = RANK) -> PeftAdapter:
    """An adapter on every target of a base whose A and B are both random: it moves log-probabilities by whole units."""
    base = read_weight_files(model)
    tensors: dict[str, Tensor] = {}
    for name in sorted(base.where):
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] not in targets:
            continue
        embedding = module.endswith(".embed_tokens")
        out, width = reversed(base.tensor(name).shape) if embedding else base.tensor(name).shape
        for factor, shape in (("A", (rank, width)), ("B", (out, rank))):
            key = factor_name(module, factor, embedding=embedding)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
            tensors[key] = torch.randn(shape, generator=generator) * 0.1
    config = {
        "base_model_name_or_path": str(model),
        "bias": "none",
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
    }
    return PeftAdapter(tensors=tensors, config=config)


def requests(
    adapter: str | None, tag: str, prompts: Iterable[Sequence[int]] = PROMPTS, new_tokens: int = 6
) -> list[SglangRequest]:
    """Sampled at temperature 1, so that the engine's log-probabilities are those of the model."""
    return [
        SglangRequest(
            rid=f"{tag}-{number}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=new_tokens),
            seed=number,
            adapter=adapter,
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Answered:
    """A request, what was drawn, and the version that it is said to come from."""

    version: int
    request: SglangRequest
    completion: SglangCompletion


def recovered_while_a_publish_waits(
    engines: Engines, sync: AdapterSync | MergeSync, later: Mapping[int, PeftAdapter]
) -> list[Answered]:
    """What a request gets whose engine dies, and is brought back by it, while a publish waits for its end.

    Args:
        engines: the first is killed.
        sync: of a version that serves now.
        later: versions that are published meanwhile; the last waits for requests of the one that serves now.
    """

    def publish() -> None:
        for version, adapter in later.items():
            sync.publish(version, adapter.tensors, adapter.config)

    with ThreadPoolExecutor(1) as thread, sync.serving() as stamp:
        published = thread.submit(publish)
        while sync._versions._last != max(later):
            assert not published.done(), published.result()
            time.sleep(0.01)
        engines.kill(0)
        sync.recover(0)
        assert not published.done(), "it waits for this request"
        sent = requests(stamp.adapter, f"before-{max(later)}")
        found = engines.group.clients[0].generate(sent)
    published.result()
    return [Answered(stamp.version, one, completion) for one, completion in zip(sent, found, strict=True)]


class Truth:
    """What transformers and PEFT say. Adapters are saved as PEFT directories for it.

    Args:
        reference: a process without SGLang.
        model: HF directory of the base.
        folder: for the adapters.
    """

    def __init__(self, reference: OwnProcess, model: Path, folder: Path) -> None:
        self._reference, self._model, self._folder = reference, model, folder
        self._numbers = itertools.count()

    def largest_gap(self, answers: Sequence[Answered], adapters: dict[int, PeftAdapter]) -> float:
        """Largest difference of a drawn token's log-probability from that of its version's adapter."""
        worst = 0.0
        for version in sorted({one.version for one in answers}):
            mine = [one for one in answers if one.version == version]
            folder = None
            if version:
                folder = self._folder / str(next(self._numbers))
                write_adapter(adapters[version], folder)
            sequences = [[*one.request.prompt_ids, *one.completion.token_ids] for one in mine]
            found = self._reference.run(
                transformers_reference.token_logprobs, str(self._model), sequences, folder and str(folder)
            )
            for one, logprobs in zip(mine, found, strict=True):
                expected = logprobs[len(one.request.prompt_ids) - 1 :]
                assert len(expected) == len(one.completion.logprobs) > 0
                worst = max(worst, *(abs(a - b) for a, b in zip(expected, one.completion.logprobs, strict=True)))
        return worst


class Asked:
    """Answers of the version that serves now, and how far they are from what transformers says.

    Args:
        engines: the first of them is asked.
        sync: knows the version.
        tag: begins the requests' ids.
        prompts: what is asked.
    """

    def __init__(
        self,
        engines: Engines,
        sync: AdapterSync | MergeSync,
        tag: str,
        prompts: Iterable[Sequence[int]] = PROMPTS,
    ) -> None:
        with sync.serving() as stamp:
            self._sent = requests(stamp.adapter, tag, prompts, new_tokens=8)
            self._found = engines.group.clients[0].generate(self._sent)
            for one in self._found:
                stamp.check(one)
        self.version = stamp.version

    def gap(self, truth: Callable[[list[list[int]]], list[list[float]]]) -> float:
        """Largest difference of a drawn token's log-probability.

        Args:
            truth: log-probabilities of tokens 1.. of each of the sequences.
        """
        both = list(zip(self._sent, self._found, strict=True))
        expected = truth([[*request.prompt_ids, *found.token_ids] for request, found in both])
        pairs = [
            pair
            for (request, found), row in zip(both, expected, strict=True)
            for pair in zip(row[len(request.prompt_ids) - 1 :], found.logprobs, strict=True)
        ]
        assert len(pairs) == 8 * len(both)
        return max(abs(expected - found) for expected, found in pairs)
