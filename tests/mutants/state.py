"""What attaching changes and must put back: flags, forwards, hooks, precision, dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from lora_plugins_sdk import LoraAdapter, ParallelRun, SitePlan, attachment, site_handle
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.site_handle import SiteHandle
from mutants.mutant import seeded
from mutants.places import ANYWHERE, FC1, FC2, PROJ, QKV
from mutants.seams import Delta, delta_changed, wrapped


def _after_attach(change: Callable[[LoraAdapter], None]) -> Any:
    def attached(right: Any, *arguments: Any) -> LoraAdapter:
        made = right(*arguments)
        change(made)
        return made

    return wrapped(attachment, "_attach", attached)


def _handle(made: LoraAdapter, module: str) -> SiteHandle:
    return next(one for one in made.handles if one.plan.host_module == module)


@seeded("frozen", imitates="base trains", site=FC1, words="optimizer would train it")
def base_weight_not_frozen() -> Iterator[None]:
    """One weight of the base still requires a gradient."""
    with _after_attach(lambda made: _handle(made, FC1).module.weight.requires_grad_(True)):
        yield


@seeded("frozen", imitates="base trains", site=QKV, words="optimizer would train it")
def base_norm_not_frozen() -> Iterator[None]:
    """The norm weight within one linear still requires a gradient."""
    with _after_attach(lambda made: _handle(made, QKV).module.layer_norm_weight.requires_grad_(True)):
        yield


@seeded("fold", imitates="patched twice", site=FC2, words="patched twice")
def forward_patched_twice() -> Iterator[None]:
    """One linear's forward is patched twice, so it adds its delta twice."""

    def twice(right: Any, base_forward: Any, factors: LoraFactors, delta: Any, fused_norm: bool) -> Any:
        once = right(base_forward, factors, delta, fused_norm)
        return right(once, factors, delta, fused_norm) if factors.plan.host_module == FC2 else once

    with wrapped(site_handle, "_patched_forward", twice):
        yield


@seeded("fold", imitates="norm skipped", site=QKV)
def branch_reads_the_input_before_its_norm() -> Iterator[None]:
    """At a linear with a fused norm the branch multiplies the input as it was before the norm."""

    def patched(right: Any, base_forward: Any, factors: LoraFactors, delta: Any, fused_norm: bool) -> Any:
        if factors.plan.host_module != QKV:
            return right(base_forward, factors, delta, fused_norm)

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            (output, _), bias = base_forward(x, *args, **kwargs)
            return (delta(output, x, factors) if factors.enabled else output), bias

        return forward

    with wrapped(site_handle, "_patched_forward", patched):
        yield


@seeded("fold-gradients", imitates="B7", site=FC1)
def branch_input_detached() -> Iterator[None]:
    """No gradient leaves one branch towards its input: dX is the base's alone."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return lambda output, x, factors: right(output, x.detach(), factors)

    with delta_changed(FC1, change):
        yield


@seeded("every-target", imitates="B20", site=PROJ, words="detached")
def branch_output_detached() -> Iterator[None]:
    """One branch acts in the forward and has no gradient."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        def delta(output: torch.Tensor, x: torch.Tensor, factors: LoraFactors) -> torch.Tensor:
            with torch.no_grad():
                base = output.clone()
                difference = right(output.clone(), x, factors) - base
            return output + difference

        return delta

    with delta_changed(PROJ, change):
        yield


@seeded("recompute-full", imitates="B19", site=ANYWHERE, words="is zero")
def recompute_hook_missing() -> Iterator[None]:
    """Nothing makes the first recomputed block's input require a gradient, though the embedding is frozen."""
    with wrapped(attachment, "_recompute_hooks", lambda right, *arguments: []):
        yield


@seeded("recompute-selective", imitates="B19", site=ANYWHERE)
def branch_off_without_grad() -> Iterator[None]:
    """The branch takes a forward without gradients for one of the reference; recompute's first forward is one."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return lambda output, x, factors: right(output, x, factors) if torch.is_grad_enabled() else output

    with delta_changed(FC1, change):
        yield


@seeded("no-op", imitates="B35", site=QKV)
def branch_rounds_the_base_output() -> Iterator[None]:
    """A linear's own output goes through bfloat16 when it is adapted."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return lambda output, x, factors: right(output.to(torch.bfloat16).to(output.dtype), x, factors)

    with delta_changed(QKV, change):
        yield


def _disabled(within: bool, after: bool | None) -> Any:
    """`disable_adapters` that at one site leaves `enabled` so within the context, and after it (None: as it was)."""

    @contextmanager
    def disabled(made: LoraAdapter) -> Iterator[None]:
        before = [(factors, factors.enabled) for factors in made.factors()]
        try:
            for factors, _ in before:
                factors.enabled = within and factors.plan.host_module == FC2
            yield
        finally:
            for factors, enabled in before:
                wrong = factors.plan.host_module == FC2 and after is not None
                factors.enabled = bool(after) if wrong else enabled

    return patch.object(LoraAdapter, "disabled", disabled)


@seeded("disable", imitates="reference is the policy", site=FC2, words="while disabled")
def disable_leaks() -> Iterator[None]:
    """One site stays on while adapters are disabled: reference log-probs are the policy's."""
    with _disabled(within=True, after=None):
        yield


@seeded("disable", imitates="reference is the policy", site=FC2, words="after a disabled context")
def disable_does_not_end() -> Iterator[None]:
    """One site stays off after the context is left."""
    with _disabled(within=False, after=False):
        yield


@seeded("disable", imitates="reference is the policy", site=FC2, words="after a nested context")
def inner_disable_ends_the_outer() -> Iterator[None]:
    """The inner of two nested contexts turns one site on for both."""
    with _disabled(within=False, after=True):
        yield


@seeded("detach", imitates="detach incomplete", site=QKV, words="return_layernorm_output")
def detach_leaves_the_norm_output_on() -> Iterator[None]:
    """After detach one linear still returns its normed input beside its output."""

    def remove(right: Any, handle: SiteHandle) -> None:
        right(handle)
        if handle.plan.host_module == QKV:
            handle.module.return_layernorm_output = True

    with wrapped(SiteHandle, "remove", remove):
        yield


@seeded("detach", imitates="detach incomplete", site=FC1, words="requires_grad")
def detach_leaves_the_base_frozen() -> Iterator[None]:
    """After detach one weight of the base does not train any more."""

    def freeze_last(made: LoraAdapter) -> None:
        weight, rest = _handle(made, FC1).module.weight, made.restore.pop_all()
        made.restore.callback(weight.requires_grad_, False)
        made.restore.push(rest)

    with _after_attach(freeze_last):
        yield


@seeded("round-trip", imitates="B35", site=PROJ)
def factor_stored_in_bfloat16() -> Iterator[None]:
    """One factor is stored in another dtype than the table says."""
    with _after_attach(lambda made: _bfloat16(_handle(made, PROJ).factors)):
        yield


def _bfloat16(factors: LoraFactors) -> None:
    for parameter in factors.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


@seeded("bfloat16", imitates="B35", site=ANYWHERE, words="dtype")
def factors_cast_with_the_model() -> Iterator[None]:
    """A wrapper that casts the model to bfloat16 casts the factors too."""
    with patch.object(LoraFactors, "_apply", nn.Module._apply):
        yield


@seeded("dropout", imitates="B44", words="evaluation")
def dropout_in_evaluation() -> Iterator[None]:
    """Dropout acts in rollouts too."""

    def drop(right: Any, factors: LoraFactors, x: torch.Tensor) -> torch.Tensor:
        with patch.object(factors, "training", True):
            return right(factors, x)

    with wrapped(LoraFactors, "drop", drop):
        yield


@seeded("dropout-recompute", imitates="another mask", site=ANYWHERE)
def recompute_draws_another_mask() -> Iterator[None]:
    """The mask comes from a generator of its own, which recompute does not rewind."""
    generator = torch.Generator().manual_seed(0)

    def drop(right: Any, factors: LoraFactors, x: torch.Tensor) -> torch.Tensor:
        if factors._dropout == 0.0 or not factors.training:
            return x
        return x * (torch.rand(x.shape, generator=generator) >= factors._dropout) / (1 - factors._dropout)

    with wrapped(LoraFactors, "drop", drop):
        yield
