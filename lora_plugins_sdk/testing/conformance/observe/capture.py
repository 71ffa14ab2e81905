"""What passes through each adapted linear: its output, and the gradients of its output and input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.host_modules import locate


@dataclass(kw_only=True)
class Captured:
    """Local tensors of each microbatch, by host module in the order of the forward pass."""

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    output_grads: dict[str, list[Tensor]] = field(default_factory=dict)
    input_grads: dict[str, list[Tensor]] = field(default_factory=dict)


@contextmanager
def capturing(places: Mapping[str, nn.Module]) -> Iterator[Captured]:
    """Watch linears, by the names to file them under, while the context is open."""
    seen = Captured()
    with ExitStack() as hooks:
        for name, module in places.items():
            hooks.callback(module.register_forward_pre_hook(_watch_input(seen, name)).remove)
            hooks.callback(module.register_forward_hook(_watch_output(seen, name)).remove)
        yield seen


def adapted_linears(adapter: LoraAdapter) -> dict[str, nn.Module]:
    """This rank's adapted host linears under model-wide names."""
    found = locate(adapter.chunks, (plan.site.path for plan in adapter.table.plans))
    wanted = {plan.host_module for plan in adapter.table.plans}
    return {name: module for name, (module, _) in found.items() if name in wanted}


def _watch_input(seen: Captured, name: str) -> Any:
    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        if not torch.is_grad_enabled():
            return
        if x.is_leaf:
            x.requires_grad_(True)  # after a frozen embedding nobody would ask for this gradient
        x.register_hook(_appender(seen.input_grads, name))

    return watch


def _watch_output(seen: Captured, name: str) -> Any:
    def watch(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        output = result[0]
        seen.outputs.setdefault(name, []).append(output.detach().clone())
        if output.requires_grad:
            output.register_hook(_appender(seen.output_grads, name))

    return watch


def _appender(store: dict[str, list[Tensor]], name: str) -> Any:
    def append(grad: Tensor) -> None:
        store.setdefault(name, []).append(grad.detach().clone())

    return append
