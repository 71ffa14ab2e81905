"""The checksums by which merge mode knows an engine's weights are those that SGLang computes."""

from __future__ import annotations

import gpu_hash
import pytest
import torch
from own_process import OwnProcess

from lora_harness.engines.sglang.sync.checksums import checksum_that_gives, on_cpu, on_gpu


def test_as_sglangs_own_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with OwnProcess() as process:
        expected = process.run(gpu_hash.checksums)
    assert [on_gpu(one) for one in gpu_hash.tensors()] == expected


def test_longer_than_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5 * 8192 + 77)
    whole = on_gpu(tensor)
    monkeypatch.setattr("lora_harness.engines.sglang.sync.checksums._WORDS_AT_ONCE", 2 * 8192)
    assert on_gpu(tensor) == whole


def test_the_engines_way_is_found() -> None:
    tensor = torch.randn(10)
    assert checksum_that_gives(on_cpu(tensor), tensor) is on_cpu
    assert checksum_that_gives(on_gpu(tensor), tensor) is on_gpu
    assert checksum_that_gives(on_cpu(tensor + 1), tensor) is None
