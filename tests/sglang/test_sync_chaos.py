"""An engine killed with SIGKILL at ten points of a sync: no half version is served, and the run goes on or stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from own_process import OwnProcess
from sync_engines import LORA_ARGUMENTS, SETTINGS, Answered, Engines, Truth, random_adapter, requests

from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.package import Packer, policy_name
from lora_harness.engines.sglang.sync.serving import PolicySync, Serving
from lora_harness.engines.sglang.sync.transport import MemoryTransport
from lora_plugins_sdk import PeftAdapter
from lora_plugins_sdk.errors import LoraError

VICTIM = 1
# The engine's call, and when it is killed: before it, a moment after it was sent, or when it has answered.
ADAPTER_POINTS = (
    ("load_adapter", "before"),
    ("load_adapter", "during"),
    ("load_adapter", "after"),
    ("loaded_adapters", "after"),
    ("unload_adapter", "before"),
    ("generate", "before"),
)
MERGE_POINTS = (
    ("begin_weight_update", "after"),
    ("update_weights", "during"),
    ("end_weight_update", "before"),
    ("weight_checksums", "before"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


class Trapped:
    """A client whose engine is killed at one point, once. Nothing of the engine is imitated.

    Args:
        client: the engine's own.
        call, moment: the point.
        unloads: the adapter whose unloading is meant, where one of an earlier version may come first.
        kill: does it.
    """

    def __init__(self, client: SglangClient, call: str, moment: str, unloads: str, kill: Callable[[], None]) -> None:
        self._client, self._call, self._moment, self._unloads, self._kill = client, call, moment, unloads, kill

    def __getattr__(self, name: str) -> Any:
        whole = getattr(self._client, name)
        if name != self._call:
            return whole

        def sprung(*args: Any) -> Any:
            if name == "unload_adapter" and args != (self._unloads,):
                return whole(*args)
            self._call = ""
            if self._moment == "before":
                self._kill()
            timer = threading.Timer(0.002, self._kill)
            if self._moment == "during":
                timer.start()
            try:
                return whole(*args)
            finally:
                timer.join() if self._moment == "during" else None
                if self._moment == "after":
                    self._kill()

        return sprung


@contextmanager
def asking(engines: Engines, sync: PolicySync, answers: list[Answered]) -> Iterator[threading.Lock]:
    """Keeps the engine that lives busy while the block runs; whoever takes the lock holds it off."""
    done, resting, failed = threading.Event(), threading.Lock(), []

    def run() -> None:
        turn = 0
        try:
            # Not without a pause: an engine that never rests takes a core from the one that is being started.
            while not done.wait(0.1):
                with resting, sync.serving() as stamp:
                    answers.extend(answered(engines, stamp, 0, f"busy-{len(answers)}-{turn}"))
                turn += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield resting
    finally:
        done.set()
        thread.join(120)
    assert not failed, failed[0]


def ask(engines: Engines, sync: PolicySync, index: int, tag: str) -> list[Answered]:
    with sync.serving() as stamp:
        try:
            return answered(engines, stamp, index, tag)
        except LoraError:
            # As the harness does: restart, and ask the engine that came back.
            sync.recover(index)
            return answered(engines, stamp, index, tag)


def answered(engines: Engines, stamp: Serving, index: int, tag: str) -> list[Answered]:
    sent = requests(stamp.adapter, tag, new_tokens=5)
    found = engines.group.clients[index].generate(sent)
    for completion in found:
        stamp.check(completion)
    return [Answered(stamp.version, one, completion) for one, completion in zip(sent, found, strict=True)]


def survive(
    engines: Engines, sync: PolicySync, points: Sequence[tuple[str, str]], adapters: dict[int, PeftAdapter]
) -> list[Answered]:
    """Publish a version for each point with the engine killed there, and ask both engines after each."""
    answers: list[Answered] = []
    sync.publish(1, adapters[1].tensors, adapters[1].config)
    with asking(engines, sync, answers) as resting:
        for version, (call, moment) in enumerate(points, start=2):
            before = policy_name(version - 1)
            engines.trap(VICTIM, lambda client: Trapped(client, call, moment, before, lambda: engines.kill(VICTIM)))  # noqa: B023
            pid = engines.servers[VICTIM].pid
            # A version that a request still names is unloaded by a later publish, which would be another point.
            with resting if call == "unload_adapter" else nullcontext():
                sync.publish(version, adapters[version].tensors, adapters[version].config)
            for index in (0, VICTIM):
                found = ask(engines, sync, index, f"{call}-{moment}-{index}")
                assert {one.version for one in found} == {version}, (call, moment)
                answers += found
            assert engines.servers[VICTIM].pid != pid, f"the engine was not killed at {call}, {moment}"
    return answers


@pytest.fixture
def truth(reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path: Path) -> Truth:
    return Truth(reference, tiny_qwen3_dir, tmp_path)


def test_adapter_mode_survives(truth: Truth, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """B36, B40: a restarted engine gets base and adapter again."""
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=version) for version in range(1, 8)}
    with Engines(tiny_qwen3_dir, tmp_path, count=2, **LORA_ARGUMENTS) as engines:
        sync = AdapterSync(engines.group, Packer(tiny_qwen3_dir, SETTINGS), SETTINGS, MemoryTransport(512))
        answers = survive(engines, sync, ADAPTER_POINTS, adapters)
        assert len([text for text in engines.said if "was restarted" in text]) == len(ADAPTER_POINTS)
        for client in engines.group.clients:
            # The version before may have had a request when the last one came.
            assert {"policy-v7"} <= client.loaded_adapters() <= {"policy-v6", "policy-v7"}
    assert truth.largest_gap(answers, adapters) <= 1e-5


def test_an_engine_that_cannot_come_back_ends_the_run(truth: Truth, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """B36, B40: the error has the cause, and the other engine goes on with the version before, on its own."""
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=version) for version in (1, 2)}
    with Engines(tiny_qwen3_dir, tmp_path, count=2, **LORA_ARGUMENTS) as engines:
        not_ours = EngineGroup(engines.group.clients, say=engines.said.append)
        sync = AdapterSync(not_ours, Packer(tiny_qwen3_dir, SETTINGS), SETTINGS, MemoryTransport(512))
        sync.publish(1, adapters[1].tensors, adapters[1].config)
        engines.kill(VICTIM)
        with pytest.raises(LoraError, match="signal SIGKILL") as told:
            sync.publish(2, adapters[2].tensors, adapters[2].config)
        assert "Requests get policy-v1 as before" in str(told.value)
        assert engines.group.clients[0].loaded_adapters() == {"policy-v1"}
        answers = ask(engines, sync, 0, "left")
        assert {one.version for one in answers} == {1}
    assert truth.largest_gap(answers, adapters) <= 1e-5


def test_merge_mode_survives(truth: Truth, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """B35, B37: an engine whose weights were half replaced serves nothing; it is started anew with the base and gets
    the version whole."""
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=version) for version in range(1, 6)}
    with Engines(tiny_qwen3_dir, tmp_path, count=2) as engines:
        sync = MergeSync(engines.group, Folder(tiny_qwen3_dir, 512), dtype=torch.float32, buffer_mib=512)
        answers = survive(engines, sync, MERGE_POINTS, adapters)
    assert truth.largest_gap(answers, adapters) <= 1e-5
