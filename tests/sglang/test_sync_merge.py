"""Merge mode on the real SGLang: values, many merges in a row, and what is checked before and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from own_process import OwnProcess
from sync_engines import Answered, Engines, Truth, random_adapter, recovered_while_a_publish_waits, requests

from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.engine_weights import differences
from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.serving import Serving
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.weight_files import read_weight_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tiny_qwen3_dir, tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture(scope="module")
def truth(reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(reference, tiny_qwen3_dir, tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def sync(engines: Engines, tiny_qwen3_dir: Path) -> Iterator[MergeSync]:
    """A fresh run on the same engine, which has the base's own weights before and after."""
    one = new_sync(engines, tiny_qwen3_dir)
    yield one
    one.restore_base()


def new_sync(engines: Engines, model: Path, buffer_mib: int = 512) -> MergeSync:
    return MergeSync(engines.group, Folder(model, buffer_mib), dtype=torch.float32, buffer_mib=buffer_mib)


def ask(engines: Engines, sync: MergeSync, tag: str) -> list[Answered]:
    with sync.serving() as stamp:
        sent = requests(stamp.adapter, tag)
        found = engines.group.clients[0].generate(sent)
        for completion in found:
            stamp.check(completion)
        return [Answered(stamp.version, one, completion) for one, completion in zip(sent, found, strict=True)]


def test_merged_weights_answer_as_peft_and_thirty_merges_do_not_drift(
    engines: Engines, truth: Truth, sync: MergeSync, tiny_qwen3_dir: Path
) -> None:
    """B35: each merge starts from the pristine base, so that the thirtieth is as exact as the first; an adapter of
    zeros gives the base back bit for bit."""
    client = engines.group.clients[0]
    pristine = dict(client.weight_checksums())
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=version) for version in range(1, 31)}
    answers = ask(engines, sync, "base")
    for version, adapter in adapters.items():
        sync.publish(version, adapter.tensors, adapter.config)
        if version in (1, 15, 30):
            answers += ask(engines, sync, f"merged-{version}")
    assert {one.version for one in answers} == {0, 1, 15, 30}
    assert {one.completion.weight_version for one in answers if one.version == 30} == {"policy-v30"}
    assert truth.largest_gap(answers, adapters) <= 1e-5
    last = adapters[30]
    sync.publish(31, {name: torch.zeros_like(one) for name, one in last.tensors.items()}, last.config)
    assert not differences(pristine, client.weight_checksums())


def test_only_what_an_adapter_touches_is_sent(
    engines: Engines, truth: Truth, sync: MergeSync, tiny_qwen3_dir: Path
) -> None:
    """Of q|k|v only q and v are pushed, in buckets of their own; what the next version leaves alone goes back to the
    base."""
    narrow = random_adapter(tiny_qwen3_dir, seed=1, targets=("q_proj", "v_proj"))
    other = random_adapter(tiny_qwen3_dir, seed=2, targets=("down_proj",))
    base = read_weight_files(tiny_qwen3_dir)
    weights = {
        leaf: sum(base.tensor(name).num_bytes for name in base.where if f".{leaf}." in name)
        for leaf in ("q_proj", "v_proj", "down_proj")
    }
    assert sync.publish(1, narrow.tensors, narrow.config) == weights["q_proj"] + weights["v_proj"]
    answers = ask(engines, sync, "narrow")
    assert sync.publish(2, other.tensors, other.config) == sum(weights.values())
    answers += ask(engines, sync, "other")
    assert truth.largest_gap(answers, {1: narrow, 2: other}) <= 1e-5


def test_small_buckets_carry_the_same(
    engines: Engines, truth: Truth, tiny_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and values do not depend on the buffer; no bucket is larger than it."""
    client = engines.group.clients[0]
    sizes: list[int] = []
    push = client.update_weights

    def counted(tensors):  # type: ignore[no-untyped-def]
        sizes.append(sum(one.numel() * one.element_size() for one in tensors.values()))
        push(tensors)

    monkeypatch.setattr(client, "update_weights", counted)
    monkeypatch.setattr("lora_harness.engines.sglang.sync.merge_mode.MIB", 2**16)
    sync = new_sync(engines, tiny_qwen3_dir, buffer_mib=2)
    adapter = random_adapter(tiny_qwen3_dir, seed=4)
    try:
        sent = sync.publish(1, adapter.tensors, adapter.config)
        assert len(sizes) > 3 and max(sizes) <= 2 * 2**16 and sum(sizes) == sent
        assert truth.largest_gap(ask(engines, sync, "buckets"), {1: adapter}) <= 1e-5
    finally:
        sync.restore_base()


class Renaming:
    """A client whose tensors arrive under names that the engine does not know: SGLang answers with success."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._client, name)

    def update_weights(self, tensors):  # type: ignore[no-untyped-def]
        self._client.update_weights({f"decoder.{name}": one for name, one in tensors.items()})


def test_names_that_the_engine_passes_over_are_found_out(engines: Engines, tiny_qwen3_dir: Path) -> None:
    """B29, B36: SGLang reports success for unknown names; the checksums of its weights tell, and the version is not
    served."""
    # Of packed weights SGLang ends at an unknown name instead; these it passes over.
    targets = ("o_proj", "down_proj", "lm_head")
    group = EngineGroup([Renaming(engines.group.clients[0])])  # type: ignore[list-item]
    sync = MergeSync(group, Folder(tiny_qwen3_dir, 512), dtype=torch.float32, buffer_mib=512)
    adapter = random_adapter(tiny_qwen3_dir, seed=3, targets=targets)
    with pytest.raises(LoraError, match="weights are not what they must be") as told:
        sync.publish(1, adapter.tensors, adapter.config)
    assert "Requests get the base as before" in str(told.value)
    with sync.serving() as stamp:
        assert stamp.version == 0


def test_an_engine_with_other_weights_is_refused(engines: Engines, tiny_qwen3_dir: Path) -> None:
    """B35: an engine that someone merged into already would get the delta of a run on top of the other's."""
    sync = new_sync(engines, tiny_qwen3_dir)
    adapter = random_adapter(tiny_qwen3_dir, seed=5)
    sync.publish(1, adapter.tensors, adapter.config)
    try:
        with pytest.raises(LoraError, match="not what they must be: lm_head"):
            new_sync(engines, tiny_qwen3_dir)
    finally:
        sync.restore_base()


def test_an_engine_that_outlives_the_run_gets_the_base_back(engines: Engines, tiny_qwen3_dir: Path) -> None:
    """B35: the next run on it begins with the base."""
    client = engines.group.clients[0]
    pristine = dict(client.weight_checksums())
    sync = MergeSync(EngineGroup([client]), Folder(tiny_qwen3_dir, 512), dtype=torch.float32, buffer_mib=512)
    adapter = random_adapter(tiny_qwen3_dir, seed=9)
    sync.publish(1, adapter.tensors, adapter.config)
    assert differences(pristine, client.weight_checksums())
    sync.close()
    assert not differences(pristine, client.weight_checksums())


def test_a_request_brings_its_engine_back_while_a_publish_waits_for_it(
    engines: Engines, truth: Truth, sync: MergeSync, tiny_qwen3_dir: Path
) -> None:
    """B36, B37: neither waits for the other for ever."""
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=40 + version) for version in (1, 2)}
    sync.publish(1, adapters[1].tensors, adapters[1].config)
    answers = recovered_while_a_publish_waits(engines, sync, {2: adapters[2]})
    answers += ask(engines, sync, "after-2")
    assert {one.version for one in answers} == {1, 2}
    assert truth.largest_gap(answers, adapters) <= 1e-5


def test_weights_from_elsewhere_are_not_taken_for_the_policys(engines: Engines, sync: MergeSync) -> None:
    """B37: an answer that the engine gave with other weights than the version's is refused."""
    with sync.serving() as stamp:
        answers = engines.group.clients[0].generate(requests(None, "stamp"))
    stamp.check(answers[0])  # the base: the engine has no stamp of ours
    with pytest.raises(LoraError, match="answered with weights"):
        Serving(version=7, weight_version="policy-v7").check(answers[0])


def test_a_memory_release_from_outside_loses_nothing(
    engines: Engines, truth: Truth, sync: MergeSync, tiny_qwen3_dir: Path
) -> None:
    """B38: the harness puts no engine to sleep. Where someone else does, SGLang ends on a CPU; the engine comes back
    with the base first and then the version, and the next version finds the base that it expects."""
    adapters = {version: random_adapter(tiny_qwen3_dir, seed=version) for version in (1, 2)}
    sync.publish(1, adapters[1].tensors, adapters[1].config)
    before = dict(engines.group.clients[0].weight_checksums())
    with pytest.raises(httpx2.TransportError):
        httpx2.post(f"{engines.group.clients[0].name}/release_memory_occupation", json={}, timeout=120.0)
    sync.recover(0)
    assert not differences(before, engines.group.clients[0].weight_checksums())
    answers = ask(engines, sync, "woken")
    sync.publish(2, adapters[2].tensors, adapters[2].config)
    answers += ask(engines, sync, "later")
    assert {one.version for one in answers} == {1, 2}
    assert truth.largest_gap(answers, adapters) <= 1e-5
