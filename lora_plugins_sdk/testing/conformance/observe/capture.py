"""What passes through each adapted linear: its output, and the gradients of its output and input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.host_modules import locate
from lora_plugins_sdk.site import Site


@dataclass(kw_only=True)
class Captured:
    """Local tensors of each microbatch, by host module in the order of the forward pass.

    Of routed experts: the sum over each local expert's tokens, `[local experts, width]`, as every layout has them in an
    order of its own.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    output_grads: dict[str, list[Tensor]] = field(default_factory=dict)
    input_grads: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A linear of the host: a module's forward, or the method that computes it; a grouped one with experts; or the
    embedding, whose output is turned to `[tokens, samples, width]` where the host turns it later.
    """

    module: nn.Module
    method: str
    experts: bool
    embedding: bool


@contextmanager
def capturing(places: Mapping[str, Place]) -> Iterator[Captured]:
    """Watch linears, by the names to file them under, while the context is open."""
    seen = Captured()
    with ExitStack() as hooks:
        for name, place in places.items():
            if place.method == "forward":
                hooks.callback(place.module.register_forward_pre_hook(_watch_input(seen, name, place)).remove)
                hooks.callback(place.module.register_forward_hook(_watch_output(seen, name, place)).remove)
            else:
                hooks.enter_context(_watched_method(seen, name, place))
        yield seen


def places_of(chunks: Iterable[nn.Module], sites: Iterable[Site]) -> dict[str, Place]:
    """The linears of these sites under model-wide names."""
    chunks = tuple(chunks)
    return {
        name: Place(module=module, method=site.method, experts=site.experts is not None, embedding=site.embedding)
        for site in sites
        for name, (module, _) in locate(chunks, [site.path]).items()
    }


def adapted_linears(adapter: LoraAdapter) -> dict[str, Place]:
    """This rank's adapted host linears under model-wide names."""
    sites = {plan.site.path: plan.site for plan in adapter.table.plans}
    found = places_of(adapter.chunks, sites.values())
    wanted = {plan.host_module for plan in adapter.table.plans}
    return {name: place for name, place in found.items() if name in wanted}


@contextmanager
def _watched_method(seen: Captured, name: str, place: Place) -> Iterator[None]:
    before = place.module.__dict__.get(place.method)
    inner = getattr(place.module, place.method)

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        _watch_input(seen, name, place)(place.module, args)
        output = inner(*args, **kwargs)
        _watch_output(seen, name, place)(place.module, args, (output, None))
        return output

    setattr(place.module, place.method, watched)
    try:
        yield
    finally:
        if before is None:
            delattr(place.module, place.method)
        else:
            setattr(place.module, place.method, before)


def _watch_input(seen: Captured, name: str, place: Place) -> Any:
    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        if not torch.is_grad_enabled() or place.embedding:
            return
        if x.is_leaf:
            x.requires_grad_(True)  # after a frozen embedding nobody would ask for this gradient
        x.register_hook(_appender(seen.input_grads, name, _splits(place, args)))

    return watch


def _watch_output(seen: Captured, name: str, place: Place) -> Any:
    def watch(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        output, splits = result if place.embedding else result[0], _splits(place, args)
        turned = place.embedding and not vars(module)["reduce_scatter_embeddings"]
        seen.outputs.setdefault(name, []).append(_kept(output, splits, turned))
        if output.requires_grad:
            output.register_hook(_appender(seen.output_grads, name, splits, turned))

    return watch


def _appender(store: dict[str, list[Tensor]], name: str, splits: list[int] | None, turned: bool = False) -> Any:
    def append(grad: Tensor) -> None:
        store.setdefault(name, []).append(_kept(grad, splits, turned))

    return append


def _splits(place: Place, args: tuple[Any, ...]) -> list[int] | None:
    """Tokens of each local expert, the second argument of a grouped linear."""
    if not place.experts:
        return None
    splits = args[1]
    return splits.tolist() if isinstance(splits, Tensor) else list(splits)


def _kept(tensor: Tensor, splits: list[int] | None, turned: bool) -> Tensor:
    tensor = tensor.detach().transpose(0, 1) if turned else tensor.detach()
    return tensor.clone() if splits is None else torch.stack([one.sum(0) for one in tensor.split(splits)])
