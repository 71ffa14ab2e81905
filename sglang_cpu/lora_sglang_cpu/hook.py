"""One replaced function of SGLang: where it is, what it must look like, why it is replaced."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from lora_sglang_cpu.errors import UnsupportedSGLang

SUPPORTED = "0.5.23"


@dataclass(frozen=True)
class Hook:
    """One function or method of SGLang and its stand-in.

    Attributes:
        target: Dotted path as SGLang's `HookRegistry` takes it.
        signature: Parameters of the function as `parameters` prints them; another signature stops the engine.
        reason: What happens without this hook.
        stand_in: Takes the function's arguments; with `around`, the original function before them.
        around: Wrap the function instead of replacing it.
    """

    target: str
    signature: str
    reason: str
    stand_in: Callable[..., Any]
    around: bool = False


def parameters(function: Callable[..., Any]) -> str:
    """The parameters of `function` with kinds and defaults, without annotations: `(x, *, eps=1e-06)`."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def check(hook: Hook) -> None:
    """Stop unless the hooked function is there with the expected parameters.

    Raises:
        UnsupportedSGLang: It is not.
    """
    try:
        found = parameters(pkgutil.resolve_name(hook.target))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        found = f"nothing to hook ({type(error).__name__}: {error})"
    if found != hook.signature:
        raise UnsupportedSGLang(
            f"lora_sglang_cpu cannot run SGLang {version('sglang')} on the CPU: {hook.target} has changed.\n"
            f"  expected: {hook.signature}\n"
            f"  found:    {found}\n"
            f"This plugin is written for sglang=={SUPPORTED}; install that version. "
            f"On a machine with an accelerator, or with LORA_SGLANG_CPU=0, the plugin stays out."
        )


def register(hooks: Iterable[Hook]) -> None:
    """Check all `hooks`, then hand all of them to SGLang, which applies them when its plugins have run.

    Raises:
        UnsupportedSGLang: One of them does not fit; none is registered then.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = tuple(hooks)
    for hook in hooks:
        check(hook)
    for hook in hooks:
        HookRegistry.register(hook.target, hook.stand_in, HookType.AROUND if hook.around else HookType.REPLACE)
