"""megatron-core's compiled functions, run as they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any


def run_eagerly() -> None:
    """Put the plain function in the place of each that megatron-core handed to `torch.compile`.

    In modules that are imported and, through `megatron.core.jit`, in those that are imported later. A caller's own
    functions, classes and models stay compiled; functions of megatron-core that a caller compiled in place before this
    do not. Idempotent.
    """
    from megatron.core import jit

    jit.disable_jit_fuser()
    for owner, name, plain in list(compiled_functions()):
        setattr(owner, name, plain)


def compiled_functions() -> Iterator[tuple[Any, str, FunctionType | staticmethod[..., Any]]]:
    """(module or class, name, what was compiled) for each of megatron-core's compiled functions and methods."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[:2] == ["megatron", "core"]]
    classes = {
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__.startswith("megatron.core")
    }
    for owner in (*modules, *classes):
        for name, value in list(vars(owner).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            if not isinstance(function, FunctionType) or hasattr(function, "_torchdynamo_disable"):
                continue
            plain = getattr(function, "_torchdynamo_orig_callable", None)
            if isinstance(plain, FunctionType):
                yield owner, name, staticmethod(plain) if isinstance(value, staticmethod) else plain
