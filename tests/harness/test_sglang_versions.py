"""Which versions are loaded, which serves, and what waits for whom."""

from __future__ import annotations

import threading

import pytest
import torch

from lora_harness.engines.sglang.sync.buckets import buckets
from lora_harness.engines.sglang.sync.versions import Versions
from lora_plugins_sdk.errors import LoraError


def published(versions: Versions, *numbers: int) -> None:
    for one in numbers:
        versions.claim(one)
        versions.flip(one)


def test_a_version_in_use_is_never_superseded() -> None:
    """B40: it stays until its last request has ended."""
    versions = Versions(keep=2)
    published(versions, 1)
    with versions.lease() as version:
        published(versions, 2)
        assert (version, versions.superseded()) == (1, [])
    assert versions.superseded() == [1]
    versions.forget(1)
    assert versions.loaded == (2,)


def test_old_versions_bound_new_ones() -> None:
    """B40: with requests of version 1 open and version 2 serving, a third has to wait."""
    versions = Versions(keep=2)
    published(versions, 1)
    lease = versions.lease()
    lease.__enter__()
    published(versions, 2)
    with pytest.raises(LoraError, match=r"2 are still in use after 0.01 s \(version 1 by 1\)"):
        versions.wait_for_room(0.01)
    waiting = threading.Thread(target=versions.wait_for_room, args=(60.0,))
    waiting.start()
    lease.__exit__(None, None, None)
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("number", [1, 2])
def test_numbers_do_not_come_back(number: int) -> None:
    """B39: also those of versions that were claimed and never served."""
    versions = Versions(keep=2)
    versions.claim(2)
    with pytest.raises(LoraError, match="a name never comes back"):
        versions.claim(number)


def test_no_request_starts_while_weights_change() -> None:
    """B37: merged weights are shared, so that a request may neither run into a change nor start in one."""
    versions = Versions(keep=2)
    inside, started = threading.Event(), threading.Event()

    def request() -> None:
        with versions.lease() as version:
            assert version == 1
            started.set()

    with versions.lease(), pytest.raises(LoraError, match="1 calls still generate"), versions.exclusively(0.01):
        inside.set()
    assert not inside.is_set()
    with versions.exclusively(1.0):
        thread = threading.Thread(target=request)
        thread.start()
        assert not started.wait(0.05)
        published(versions, 1)
    assert started.wait(10)
    thread.join(10)


def test_one_version_cannot_be_all() -> None:
    with pytest.raises(LoraError, match="use 2 or more"):
        Versions(keep=1)


def test_buckets_are_full_in_order_and_bounded() -> None:
    tensors = [(f"{index}", torch.ones(size, dtype=torch.uint8)) for index, size in enumerate((5, 5, 1, 10, 3, 3))]
    assert [list(one) for one in buckets(tensors, 10)] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert list(buckets([], 10)) == []
