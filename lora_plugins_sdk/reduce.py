"""The gradient sums that the parameter table asks for: once per step, coalesced, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lora_plugins_sdk.adapter import Model, adapter_of, chunks_of
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.region import GRAD_SUM_GROUPS

_WIRED = "_lora_reduces_gradients"


def reduce_grads(model: Model) -> None:
    """Sum the gradients of replicated factors over the groups that the table names. Collective over those groups.

    Call it once per optimizer step, after the last backward. It is linear, so it may run before or after the
    data-parallel reduction and any scaling; it must not run while a reduction of the same buffers is in flight. Works
    on `main_grad` where the host keeps one, else on `grad`; a factor without a gradient counts as zero.

    Raises:
        LoraError: no adapter is attached.
    """
    adapter = adapter_of(model)
    run = adapter.run
    groups: Mapping[str, dist.ProcessGroup | None] = {
        "tp": run.tp_group,
        "etp": run.etp_group,
        "etp_ep": run.etp_ep_group,
    }
    assert set(groups) == set(GRAD_SUM_GROUPS)
    tagged: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
    for parameter in adapter.parameters():
        name = parameter.grad_sum_group  # type: ignore[attr-defined]
        if name is not None:
            tagged.setdefault((name, _grad(parameter).dtype), []).append(parameter)
    for (name, _), parameters in sorted(tagged.items(), key=lambda item: str(item[0])):
        _sum_coalesced(parameters, groups[name])


def reduce_grads_in_finalize(model: Model) -> None:
    """Wire `reduce_grads` into megatron-core: it runs at the end of `config.finalize_model_grads_func`.

    After the host's own function, since by then no asynchronous reduction of the buffers is in flight. With
    distributed-optimizer buffers, where only this rank's shard of a buffer is complete, the sum of that shard is still
    right: ranks of one TP group own the same shard, and for experts those of one ETP x EP group. Call it after whatever
    else sets that function; `detach` takes it out again.

    Raises:
        LoraError: no adapter is attached, the host has no `config`, or it is wired already. Later, in a forward pass
            with gradients: something else set that function, so that the sums would be lost.
    """
    adapter = adapter_of(model)
    configs = {id(config): config for config in map(_config, chunks_of(model))}
    for config in configs.values():
        if hasattr(config.finalize_model_grads_func, _WIRED):
            raise LoraError(
                "finalize_model_grads_func",
                reason="reduces the adapter's gradients already, and a second sum would be wrong",
                cure="call reduce_grads_in_finalize once",
            )
    for config in configs.values():
        before = config.finalize_model_grads_func
        wired = config.finalize_model_grads_func = _then_reduce(before, model)
        adapter.restore.callback(_unwire, config, wired, before)
    check: Any = torch.compiler.disable(_refuse_overwritten)
    for chunk in chunks_of(model):
        adapter.restore.callback(chunk.register_forward_pre_hook(check).remove)


def _refuse_overwritten(chunk: nn.Module, inputs: object) -> None:
    """A trainer that sets the function at its start would train replicated factors on their own parts alone."""
    function = _config(chunk).finalize_model_grads_func
    while torch.is_grad_enabled() and not hasattr(function, _WIRED):
        wrapped = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if wrapped is None:
            raise LoraError(
                "finalize_model_grads_func",
                reason="was set anew after reduce_grads_in_finalize, so the adapter's gradients would not be summed",
                cure="call reduce_grads_in_finalize after that, or wrap the function that it set",
            )
        function = wrapped


def _unwire(config: Any, wired: Callable[..., None], before: Callable[..., None] | None) -> None:
    if config.finalize_model_grads_func is wired:
        config.finalize_model_grads_func = before


def _config(chunk: nn.Module) -> Any:
    config = getattr(chunk, "config", None)
    if config is None or not hasattr(config, "finalize_model_grads_func"):
        raise LoraError(
            "this model",
            reason="has no megatron-core config to wire into",
            cure="call reduce_grads after the backward yourself",
        )
    return config


def _then_reduce(finalize: Callable[..., None] | None, model: Model) -> Callable[..., None]:
    if finalize is None:
        from megatron.core.distributed import finalize_model_grads as finalize

    def finalize_then_reduce(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        reduce_grads(model)

    setattr(finalize_then_reduce, _WIRED, True)
    return finalize_then_reduce


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        return main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _sum_coalesced(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    if group is None or group.size() == 1:
        return
    grads = [_grad(parameter) for parameter in parameters]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
