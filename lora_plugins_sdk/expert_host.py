"""Grouped linears of routed experts as a host has them: `weight0`, `weight1` ..., `forward(x, m_splits)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.host_modules import locate
from lora_plugins_sdk.input_gradient import BranchInput
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.table import SitePlan


def check_expert_host(module: nn.Module, plan: SitePlan, facts: RunFacts) -> None:
    """Refuse a module that does not hold this rank's part of the experts' weights.

    Raises:
        LoraError: another number of experts, another shape, or another direction of the tensor parallel split.
    """
    where = plan.host_module
    weights = expert_weights(module)
    experts = max(row.full_shape[0] for row in plan.rows) // facts.ep
    if set(weights) != set(range(experts)):
        raise LoraError(
            where,
            reason=f"holds the weights of {len(weights)} experts, the HF config and expert parallel size {facts.ep} "
            f"give {experts}",
            cure="attach with the config.json and the parallel sizes that the model was built with",
        )
    expected = expert_weight_shape(plan, facts.etp)
    for number, weight in weights.items():
        if tuple(weight.shape) != expected:
            raise LoraError(
                f"{where}.weight{number}",
                reason=f"has shape {tuple(weight.shape)}, the HF config and run give {expected}",
                cure="attach with the config.json and the parallel sizes (etp) that the model was built with",
            )
    split = getattr(weights[0], "partition_dim", None) if getattr(weights[0], "tensor_model_parallel", False) else None
    if (plan.site.kind, split) in ((SiteKind.COLUMN, 1), (SiteKind.ROW, 0)):
        raise LoraError(
            where,
            reason=f"tensor parallelism splits its weights along dimension {split}, its site is declared "
            f"{plan.site.kind.name}",
            cure="declare the kind that the host linear has (COLUMN splits dimension 0, ROW dimension 1)",
        )


def expert_weights(module: nn.Module) -> dict[int, nn.Parameter]:
    """`weight<number>` parameters of a grouped linear by number."""
    found = ((re.fullmatch(r"weight(\d+)", name), value) for name, value in module.named_parameters(recurse=False))
    return {int(match[1]): value for match, value in found if match}


def expert_weight_shape(plan: SitePlan, etp: int) -> tuple[int, int]:
    """Local shape `[out, in]` of one expert's host weight."""
    split = etp if plan.site.kind is SiteKind.COLUMN else 1
    return plan.layout.host_rows // split, plan.rows[0].local_shape[-1]


def refuse_sequential(chunks: Iterable[nn.Module], plans: Iterable[SitePlan]) -> None:
    """Refuse a host whose experts are modules of their own.

    Raises:
        LoraError: naming the first such module.
    """
    owners = dict.fromkeys(plan.site.path.rsplit(".", 1)[0] for plan in plans if plan.site.experts)
    for path, (module, _) in locate(chunks, owners).items():
        if hasattr(module, "local_experts"):
            raise LoraError(
                path,
                reason=f"is a {type(module).__name__}, one module per expert; adapters go into grouped linears",
                cure="build the model with moe_grouped_gemm=True",
            )


def patched_expert_forward(
    base_forward: Callable[..., Any], factors: LoraFactors, delta: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    """`forward(x, m_splits)` with the branch added."""
    # The branch mutates a buffer: it runs as it is, also within a compiled model.
    add_delta: Any = torch.compiler.disable(delta)
    mark_input: Any = torch.compiler.disable(BranchInput.apply)

    def forward(x: torch.Tensor, m_splits: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        if not factors.enabled:
            return base_forward(x, m_splits, *args, **kwargs)
        x = mark_input(x)
        output, bias = base_forward(x, m_splits, *args, **kwargs)
        return add_delta(output, x, factors, m_splits), bias

    return forward
