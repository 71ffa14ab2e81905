"""Adapter mode on the real SGLang: values through both transports, flips under load, names, retention, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from own_process import OwnProcess
from sync_engines import (
    LORA_ARGUMENTS,
    PROMPTS,
    SETTINGS,
    Answered,
    Engines,
    Truth,
    random_adapter,
    recovered_while_a_publish_waits,
    requests,
)

from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.package import Packer
from lora_harness.engines.sglang.sync.transport import AdapterTransport, DirectoryTransport, MemoryTransport
from lora_plugins_sdk import PeftAdapter
from lora_plugins_sdk.errors import LoraError

pytestmark = pytest.mark.slow

Sync = Callable[..., AdapterSync]


@pytest.fixture(scope="module")
def engines(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tiny_qwen3_dir, tmp_path_factory.mktemp("logs"), **LORA_ARGUMENTS) as started:
        yield started


@pytest.fixture(scope="module")
def truth(reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(reference, tiny_qwen3_dir, tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def new_sync(engines: Engines, tiny_qwen3_dir: Path, tmp_path: Path) -> Iterator[Sync]:
    """A fresh run on the same engine."""
    made: list[AdapterSync] = []

    def make(transport: AdapterTransport | None = None, keep: int = 2) -> AdapterSync:
        packer = Packer(tiny_qwen3_dir, SETTINGS)
        made.append(AdapterSync(engines.group, packer, SETTINGS, transport or MemoryTransport(512), keep=keep))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(engines: Engines, sync: AdapterSync, tag: str, new_tokens: int = 6) -> list[Answered]:
    with sync.serving() as stamp:
        sent = requests(stamp.adapter, tag, new_tokens=new_tokens)
        return [
            Answered(stamp.version, request, completion)
            for request, completion in zip(sent, engines.group.clients[0].generate(sent), strict=True)
        ]


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_random_adapter_on_every_target_answers_as_peft(
    engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path, tmp_path: Path, kind: str
) -> None:
    """B24, B29, B36: every tensor arrives under the name that the engine uses, gate and up in their own places."""
    transport = MemoryTransport(512) if kind == "memory" else DirectoryTransport(tmp_path / "policy")
    sync = new_sync(transport)
    before = ask(engines, sync, f"{kind}-base")
    adapter = random_adapter(tiny_qwen3_dir, seed=1)
    sent = sync.publish(1, adapter.tensors, adapter.config)
    after = ask(engines, sync, f"{kind}-v1")
    assert sent == adapter.num_bytes
    assert {one.version for one in before} == {0} and {one.version for one in after} == {1}
    assert truth.largest_gap([*before, *after], {1: adapter}) <= 1e-5
    assert truth.largest_gap([Answered(0, one.request, one.completion) for one in after], {}) > 0.1, "it has no effect"


def test_twenty_flips_under_load(engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path) -> None:
    """B37, B39, B40, B41: while requests run, each is answered by the version that it names, at every moment no more
    versions are loaded than allowed, and no name that a request uses goes away."""
    sync = new_sync()
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=100 + version) for version in range(1, 21)}
    answers: list[Answered] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def keep_asking(worker: int) -> None:
        turn = 0
        try:
            while not done.is_set():
                # The same prompts again and again: a stale prefix cache would answer with an old version.
                answers.extend(ask(engines, sync, f"load-{worker}-{turn}", new_tokens=4 + 8 * worker))
                turn += 1
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=keep_asking, args=(worker,)) for worker in range(3)]
    for one in workers:
        one.start()
    held = []
    for version, adapter in adapters.items():
        sync.publish(version, adapter.tensors, adapter.config)
        held.append(len(engines.group.clients[0].loaded_adapters()))
        answers.extend(ask(engines, sync, f"new-{version}"))
    done.set()
    for one in workers:
        one.join(120)
    assert not failed, failed[0]
    assert {one.version for one in answers} >= adapters.keys()
    assert max(held) <= 2
    assert truth.largest_gap(answers, adapters) <= 1e-5


def test_two_versions_in_flight(engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path) -> None:
    """B37, B40: a long request goes on with the version it began with while short ones get the new one, and the old
    version stays loaded until it has ended."""
    sync = new_sync()
    adapters = {1: random_adapter(tiny_qwen3_dir, seed=31), 2: random_adapter(tiny_qwen3_dir, seed=32)}
    sync.publish(1, adapters[1].tensors, adapters[1].config)
    client = engines.group.clients[0]
    long: list[Answered] = []
    begun, looked = threading.Event(), threading.Event()

    def run_long() -> None:
        with sync.serving() as stamp:
            sent = requests(stamp.adapter, "long", [(9, 8, 7)], new_tokens=480)
            begun.set()
            long.append(Answered(stamp.version, sent[0], client.generate(sent)[0]))
            looked.wait(120)  # however fast the engine was

    thread = threading.Thread(target=run_long)
    thread.start()
    assert begun.wait(60)
    sync.publish(2, adapters[2].tensors, adapters[2].config)
    short = ask(engines, sync, "short")
    assert client.loaded_adapters() == {"policy-v1", "policy-v2"}
    looked.set()
    thread.join(120)
    assert {one.version for one in short} == {2} and long[0].version == 1
    assert len(long[0].completion.token_ids) == 480
    assert truth.largest_gap([*short, *long], adapters) <= 1e-5
    third = random_adapter(tiny_qwen3_dir, seed=33)
    sync.publish(3, third.tensors, third.config)
    assert client.loaded_adapters() == {"policy-v2", "policy-v3"} or client.loaded_adapters() == {"policy-v3"}


def test_a_request_brings_its_engine_back_while_a_publish_waits_for_it(
    engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path
) -> None:
    """B36, B40: neither waits for the other for ever."""
    sync = new_sync()
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=40 + version) for version in (1, 2, 3)}
    sync.publish(1, adapters[1].tensors, adapters[1].config)
    # Both places are taken by the second.
    answers = recovered_while_a_publish_waits(engines, sync, {version: adapters[version] for version in (2, 3)})
    answers += ask(engines, sync, "after-3")
    assert {one.version for one in answers} == {1, 3}
    assert truth.largest_gap(answers, adapters) <= 1e-5


def test_slots_of_several_ranks_and_scales(
    engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path
) -> None:
    """B41: adapters of several ranks and scales follow each other through the same slots, two of them in one batch with
    the base; each keeps its own rank and scale, and nothing of the one before is left in the slot."""
    client = engines.group.clients[0]
    answers: list[Answered] = []
    adapters: dict[int, PeftAdapter] = {}
    for first, second in ((8, 2), (4, 8), (2, 4)):
        sync = new_sync(keep=2)
        numbers = (len(adapters) + 1, len(adapters) + 2)
        with ExitStack() as open_requests:
            stamps = [open_requests.enter_context(sync.serving())]
            for version, rank in zip(numbers, (first, second), strict=True):
                alone = random_adapter(tiny_qwen3_dir, seed=version, rank=rank)
                adapters[version] = PeftAdapter(
                    tensors=alone.tensors, config={**alone.config, "lora_alpha": 4.0 + 2 * version}
                )
                sync.publish(version, adapters[version].tensors, adapters[version].config)
                stamps.append(open_requests.enter_context(sync.serving()))
            sent = [one for stamp in stamps for one in requests(stamp.adapter, f"mixed-{stamp.version}-{first}")]
            versions = [stamp.version for stamp in stamps for _ in PROMPTS]
            # One message, so one batch; base, first and second take turns in it.
            order = sorted(range(len(sent)), key=lambda index: index % len(PROMPTS))
            found = client.generate([sent[index] for index in order])
            answers += [
                Answered(versions[index], sent[index], completion)
                for index, completion in zip(order, found, strict=True)
            ]
        sync.close()
    assert {one.version for one in answers} == {0, *adapters}
    assert truth.largest_gap(answers, adapters) <= 1e-5


def test_a_name_never_comes_back(engines: Engines, new_sync: Sync, tiny_qwen3_dir: Path) -> None:
    """B39: neither the same version nor an earlier one can be published again, also after one that failed."""
    sync = new_sync()
    adapter = random_adapter(tiny_qwen3_dir, seed=1)
    sync.publish(3, adapter.tensors, adapter.config)
    for version in (3, 2):
        with pytest.raises(LoraError, match="a name never comes back"):
            sync.publish(version, adapter.tensors, adapter.config)
    assert engines.group.clients[0].loaded_adapters() == {"policy-v3"}


def test_the_trainers_tensors_stay_its_own(
    engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path
) -> None:
    """B24: publishing changes no tensor of the trainer, and what the trainer does to its tensors afterwards changes
    nothing that was published."""
    sync = new_sync()
    adapter = random_adapter(tiny_qwen3_dir, seed=6)
    mine = {name: one.clone() for name, one in adapter.tensors.items()}
    sync.publish(1, mine, adapter.config)
    for name, one in mine.items():
        assert torch.equal(one, adapter.tensors[name]), name
        one.zero_()
    assert truth.largest_gap(ask(engines, sync, "own"), {1: adapter}) <= 1e-5


def test_another_runs_policy_is_not_taken_over(engines: Engines, new_sync: Sync, tiny_qwen3_dir: Path) -> None:
    """B39: a name that an engine holds from before may mean other values."""
    adapter = random_adapter(tiny_qwen3_dir, seed=1)
    new_sync().publish(1, adapter.tensors, adapter.config)
    with pytest.raises(LoraError, match="holds policy-v1 of another run"):
        new_sync()


def test_a_wrong_checksum_is_refused_by_the_engine_before_the_flip(
    engines: Engines, truth: Truth, new_sync: Sync, tiny_qwen3_dir: Path
) -> None:
    """A tensor that changed on the way: SGLang ends rather than serve it, and comes back with the version before."""

    class Garbled(MemoryTransport):
        def load(self, client, package):  # type: ignore[no-untyped-def]
            changed = {name: one.clone() for name, one in package.tensors.items()}
            if package.version == 2:
                next(iter(changed.values()))[0, 0] += 1
            client.load_adapter(package.name, changed, package.config, package.checksums)

    sync = new_sync(Garbled(512))
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=version) for version in (1, 2)}
    sync.publish(1, adapters[1].tensors, adapters[1].config)
    with pytest.raises(LoraError, match="Requests get policy-v1 as before"):
        sync.publish(2, adapters[2].tensors, adapters[2].config)
    sync.recover(0)
    answers = ask(engines, sync, "garbled")
    assert {one.version for one in answers} == {1}
    assert truth.largest_gap(answers, adapters) <= 1e-5
