"""The same adapter in the forms it usually has, to compare with: separate operations, and PEFT's layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.free_linear import FreeLinear, free_forward
from benchmarks.qwen3_layer import AdaptedSite


def separate_operations(site: AdaptedSite) -> Callable[[], None]:
    """Forward and backward with the branch as one would write it down, around a host linear that costs nothing.

    The A's are parameters of their own, concatenated in each step; each projection's delta is a linear of its slice;
    the deltas are concatenated in the host's layout, scaled and added. Of one projection nothing is concatenated.
    """
    factors, layout, fused_norm = site.module.lora, site.plan.layout, site.plan.site.fused_norm
    host = free_forward(site.weight, len(site.x), fused_norm=fused_norm)
    as_: list[Tensor] = [nn.Parameter(a.detach().clone()) for a in factors.a.split(site.rank)]
    bs = [nn.Parameter(b.detach().clone()) for b in factors.bs]

    def step() -> None:
        result, _ = host(site.x)
        output, normed = result if fused_norm else (result, site.x)
        s = linear(normed, torch.cat(as_) if len(as_) > 1 else as_[0])
        deltas = [linear(part, b) for part, b in zip(s.split(site.rank, dim=-1), bs, strict=True)]
        delta = deltas[0]
        if len(deltas) > 1:
            blocked = [delta.view(*delta.shape[:-1], layout.blocks, -1) for delta in deltas]
            delta = torch.cat(blocked, dim=-1).view(output.shape)
        (output + delta * factors.scale).backward(site.grad)
        site.forget()
        for parameter in (*as_, *bs):
            parameter.grad = None

    return step


def unfused_linears(site: AdaptedSite) -> nn.ModuleDict:
    """The HF model's linears that the host weight packs, costing nothing: name -> Linear(in, rows)."""
    layout, width = site.plan.layout, site.weight.shape[1]
    names = [projection.leaf for projection in site.plan.site.projections]
    return nn.ModuleDict({name: FreeLinear(width, layout.rows(index), len(site.x)) for index, name in enumerate(names)})


def with_peft(linears: nn.ModuleDict, site: AdaptedSite) -> nn.Module:
    """PEFT's LoRA layers around the same linears, with random factors."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=site.rank, lora_alpha=2 * site.rank, target_modules=list(linears), init_lora_weights=False)
    return inject_adapter_in_model(config, linears)


def linears_step(linears: nn.Module, site: AdaptedSite) -> Callable[[], None]:
    """Forward and backward of linears that share the site's input, with or without PEFT around them."""
    modules = list(linears.children())
    layout = site.plan.layout
    grads = [torch.randn(*site.grad.shape[:-1], layout.rows(index)) for index in range(len(modules))]

    def step() -> None:
        torch.autograd.backward([module(site.x) for module in modules], grads)
        site.x.grad = None
        linears.zero_grad()

    return step
