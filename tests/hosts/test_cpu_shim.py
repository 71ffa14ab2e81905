"""The CPU shim: idempotent, and absent where CUDA is there. What it lifts is exercised by the training-step tests."""

import subprocess
import sys

import torch

from lora_plugins_sdk.hosts.cpu_shim import install_cpu_shim
from lora_plugins_sdk.hosts.eager_functions import compiled_functions

WITH_CUDA = """
import torch
torch.cuda.is_available = lambda: True
before = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.current_stream)
from lora_plugins_sdk.hosts.cpu_shim import install_cpu_shim
assert install_cpu_shim() is False
assert before == (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.current_stream)
import sys
assert "megatron.core.pipeline_parallel" not in sys.modules
"""


def test_installing_twice_changes_nothing_more() -> None:
    assert install_cpu_shim()
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.pipeline_parallel import schedules

    def patched() -> tuple[object, ...]:
        return torch.cuda.current_device, schedules.torch, LanguageModule.setup_embeddings_and_output_layer

    before = patched()
    assert install_cpu_shim()
    assert patched() == before


def test_nothing_is_touched_where_cuda_is_available() -> None:
    subprocess.run([sys.executable, "-c", WITH_CUDA], check=True, timeout=120)


def test_no_function_of_megatron_core_is_compiled() -> None:
    """Whatever is imported before the shim or after it; what a caller compiles stays so."""
    install_cpu_shim()
    from megatron.core import jit
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction, swiglu

    @torch.compile
    def own(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert not list(compiled_functions()) and jit.jit_fuser(own) is own and hasattr(own, "_torchdynamo_orig_callable")
    x = torch.randn(3, 8)
    first, second = x.chunk(2, -1)
    expected = torch.nn.functional.silu(first) * second
    torch.testing.assert_close(swiglu(x), expected)
    torch.testing.assert_close(SwiGLUFunction.apply(x, False, False), expected)


def test_only_the_schedules_see_cuda_as_the_cpu() -> None:
    install_cpu_shim()
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device == torch.device("cpu")
    assert schedules.torch.zeros(2, device="meta").device == torch.device("meta")
    assert schedules.torch.nn.Module is torch.nn.Module
    assert not torch.cuda.is_available()
