"""The CPU plugin is active where SGLang found no device, never where it found one, and costs nothing then."""

from __future__ import annotations

import pytest
from test_hooks_fit import run

from lora_sglang_cpu import activation
from lora_sglang_cpu.errors import CannotActivate


@pytest.mark.parametrize(
    ("switch", "device", "expected"),
    [(None, None, True), ("", None, True), ("1", None, True), (None, "CudaSRTPlatform", False), ("0", None, False)],
)
def test_the_machine_decides_unless_told_to_stay_out(
    monkeypatch: pytest.MonkeyPatch, switch: str | None, device: str | None, expected: bool
) -> None:
    monkeypatch.setattr(activation, "sglang_device", lambda: device)
    if switch is None:
        monkeypatch.delenv(activation.SWITCH, raising=False)
    else:
        monkeypatch.setenv(activation.SWITCH, switch)
    assert activation.wanted() is expected


def test_asking_for_the_cpu_on_a_machine_with_a_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "sglang_device", lambda: "CudaSRTPlatform")
    monkeypatch.setenv(activation.SWITCH, "1")
    with pytest.raises(CannotActivate, match=r"runs on CudaSRTPlatform here.*CUDA_VISIBLE_DEVICES=''"):
        activation.wanted()


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(activation.SWITCH, "yes")
    with pytest.raises(CannotActivate, match="LORA_SGLANG_CPU='yes' is not understood"):
        activation.wanted()


ON_A_GPU = """
import sys, torch
import sglang.srt.platforms as platforms
platforms._current_platform = platforms.CudaSRTPlatform()  # what SGLang chooses where CUDA is
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
assert "lora_sglang_cpu" in sys.modules, "SGLang did not find the plugin"
assert not HookRegistry._hooks and "vllm" not in sys.modules and not hasattr(torch.tensor, "__wrapped__")
"""


def test_nothing_is_patched_on_a_machine_with_a_gpu() -> None:
    result = run(ON_A_GPU, LORA_SGLANG_CPU="")
    assert result.returncode == 0, result.stderr


OFF = """
import sys
import lora_sglang_cpu
lora_sglang_cpu.activate()
assert not {"torch", "sglang"} & set(sys.modules)
"""


def test_switched_off_it_imports_neither_torch_nor_sglang() -> None:
    result = run(OFF, LORA_SGLANG_CPU="0")
    assert result.returncode == 0, result.stderr
