"""Each hooked function of SGLang is there as expected, and another SGLang is refused in one message."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, as SGLang's processes are."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env={**os.environ, **environ}
    )


ALL = """
from lora_sglang_cpu.families import HOOKS, install
from sglang.srt.plugins.hook_registry import HookRegistry
install()
assert set(HookRegistry._hooks) == {hook.target for hook in HOOKS}
"""


def test_every_hooked_function_is_there_with_its_parameters() -> None:
    result = run(ALL)
    assert result.returncode == 0, result.stderr


CHANGED = """
import sglang.srt.lora.utils as utils
utils.get_hidden_dim = lambda module_name, config, *, rank=1: None
from sglang.srt.plugins import load_plugins
load_plugins()
print("went on")
"""


def test_a_changed_function_ends_the_process_with_one_message() -> None:
    result = run(CHANGED)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert "Traceback" not in result.stderr
    assert result.stderr.count("sglang.srt.lora.utils.get_hidden_dim has changed") == 1
    assert "expected: (module_name, config, base_model, layer_idx, lora_added_vocab_size=0)" in result.stderr
    assert "found:    (module_name, config, *, rank=1)" in result.stderr
    assert "written for sglang==0.5.23" in result.stderr


GONE = """
import sglang.kernels.ops.mamba.causal_conv1d_triton as gone
del gone.causal_conv1d_update
from lora_sglang_cpu import base, families
from sglang.srt.plugins.hook_registry import HookRegistry
try:
    families.install()
except SystemExit as error:
    print(error.code)
assert not HookRegistry._hooks, "a hook was registered although another does not fit"
import torch
assert not hasattr(torch.tensor, "__wrapped__"), "torch was patched although a hook does not fit"
"""


def test_a_missing_function_is_told_and_nothing_is_patched() -> None:
    result = run(GONE)
    assert result.returncode == 0, result.stderr
    assert "causal_conv1d_triton.causal_conv1d_update has changed" in result.stdout
    assert "found:    nothing to hook (AttributeError: " in result.stdout


OTHER = """
import sys
sys.modules["sglang.kernels.ops.attention"] = None
from sglang.srt.plugins import load_plugins
load_plugins()
print("went on")
"""


def test_a_package_that_another_sglang_lacks_ends_the_process_too() -> None:
    """SGLang logs any exception of a plugin but this one and goes on without its hooks."""
    result = run(OTHER)
    assert result.returncode == 1 and "went on" not in result.stdout
    assert "has changed" in result.stderr and "written for sglang==0.5.23" in result.stderr
