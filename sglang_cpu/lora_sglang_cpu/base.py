"""What every model needs: SGLang expects streams, pinned memory and vLLM on a machine whose device it does not know."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch


def install() -> None:
    """Patch torch and the module table of this process."""
    stub_vllm()
    drop_pinned_memory()


def stub_vllm() -> None:
    """Without: `RotaryEmbedding.__init__` fails at `from vllm._custom_ops import rotary_embedding`. The kernel itself
    is never called, since the native forward is chosen."""
    if importlib.util.find_spec("vllm") is not None:
        return

    def rotary_embedding(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "vLLM's rotary kernel was called on a CPU engine; SGLang's native rotary embedding was expected"
        )

    package, operations = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    for module in (package, operations):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, loader=None)
    package.__path__ = []
    package._custom_ops = operations  # type: ignore[attr-defined]
    operations.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules.update({"vllm": package, "vllm._custom_ops": operations})


def drop_pinned_memory() -> None:
    """Without: wrapping a layer for adapters, and each batch, fails in `torch.tensor`, `torch.zeros` or `pin_memory`.

    Torch pins host memory through an accelerator only. No other factory was seen to be asked for pinned memory.
    """

    def unpinned(factory: Any) -> Any:
        @functools.wraps(factory)
        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return factory(*args, **kwargs)

        return make

    torch.tensor = unpinned(torch.tensor)
    torch.zeros = unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
