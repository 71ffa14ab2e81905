"""The sum over TP that the table asks for: skipped, repeated, averaged, over other ranks, or on another buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lora_plugins_sdk import adapter_of, reduce
from mutants.mutant import seeded
from mutants.places import ANYWHERE, CP2, DP2, TP2_SP
from mutants.seams import wrapped


@seeded("gradients", TP2_SP, imitates="B20", site=ANYWHERE, words="a gradient sum or a collective over TP is missing")
def reduction_skipped() -> Iterator[None]:
    """The hook that should sum gradients finds nothing to do."""
    with wrapped(reduce, "reduce_grads", lambda right, model: None):
        yield


@seeded("gradients", TP2_SP, imitates="B8", site=ANYWHERE, words="summed over the 2 TP ranks")
def reduction_twice() -> Iterator[None]:
    """Gradients are summed twice in one step."""

    def twice(right: Any, model: Any) -> None:
        right(model)
        right(model)

    with wrapped(reduce, "reduce_grads", twice):
        yield


@seeded("gradients", TP2_SP, imitates="mean in place of sum", site=ANYWHERE, words="an average was taken")
def reduction_averages() -> Iterator[None]:
    """Gradients of replicated factors are averaged over TP."""

    def average(right: Any, parameters: list[Any], group: Any) -> None:
        right(parameters, group)
        for parameter in parameters:
            parameter.main_grad.div_(group.size())

    with wrapped(reduce, "_sum_coalesced", average):
        yield


@seeded("gradients", TP2_SP, imitates="B6", site=ANYWHERE, words="a gradient sum or a collective over TP is missing")
def reduction_over_the_wrong_group() -> Iterator[None]:
    """Gradients of replicated factors are summed over the data parallel group."""
    from megatron.core import parallel_state

    def other_group(right: Any, parameters: list[Any], group: Any) -> None:
        right(parameters, parallel_state.get_data_parallel_group())

    with wrapped(reduce, "_sum_coalesced", other_group):
        yield


@seeded("gradients", TP2_SP, imitates="B3", site=ANYWHERE, words="a gradient sum or a collective over TP is missing")
def reduction_of_grad_where_main_grad_counts() -> Iterator[None]:
    """The sum is taken of `grad`, while the optimizer reads `main_grad`."""

    def grad(right: Any, parameter: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    with wrapped(reduce, "_grad", grad):
        yield


@seeded("gradients", DP2, imitates="B2", site=ANYWHERE, words="an average was taken twice")
def average_over_dp_twice() -> Iterator[None]:
    """The adapter divides by the data parallel size, which the host has done already."""

    def divide(right: Any, model: Any) -> None:
        right(model)
        adapter = adapter_of(model)
        for parameter in adapter.parameters():
            vars(parameter)["main_grad"].div_(adapter.run.facts.dp)

    with wrapped(reduce, "reduce_grads", divide):
        yield


@seeded("replicas", TP2_SP, site=ANYWHERE, words="ranks drift apart")
@seeded("two-steps", TP2_SP, imitates="B3", site=ANYWHERE)
def reduction_in_the_first_step_only() -> Iterator[None]:
    """The sum over TP is done once and then never again."""
    done: list[Any] = []

    def once(right: Any, model: Any) -> None:
        if model not in done:
            done.append(model)
            right(model)

    with wrapped(reduce, "reduce_grads", once):
        yield


@seeded("gradients", CP2, imitates="B2", site=ANYWHERE, words="summed over the 2 CP ranks")
def sum_over_cp_twice() -> Iterator[None]:
    """The adapter sums over context parallel ranks, which the host has done already."""
    from megatron.core import parallel_state

    def again(right: Any, model: Any) -> None:
        right(model)
        for parameter in adapter_of(model).parameters():
            dist.all_reduce(vars(parameter)["main_grad"], group=parallel_state.get_context_parallel_group())

    with wrapped(reduce, "reduce_grads", again):
        yield
