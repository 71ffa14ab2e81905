"""The host side of an embedding's adapter: megatron-core's `VocabParallelEmbedding`, checked and patched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.host_weight import check_weight_shape
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import SitePlan


def check_embedding_host(module: nn.Module, plan: SitePlan, facts: RunFacts) -> None:
    """Refuse a module that is not the embedding of the plan.

    Raises:
        LoraError: its weight is not this rank's part of `[vocabulary, hidden]`, or its output lies otherwise than the
            run says: under sequence parallelism it is scattered there, and else not.
    """
    a, b = plan.rows
    expected = (a.local_shape[1], b.local_shape[0])
    check_weight_shape(module, plan, expected, facts)
    scatters = getattr(module, "reduce_scatter_embeddings", None)
    if scatters is None:
        raise LoraError(
            plan.host_module,
            reason="is no VocabParallelEmbedding of megatron-core (no `reduce_scatter_embeddings`)",
            cure="correct the site's path in the plugin's architecture, or declare it without embedding=True",
        )
    if scatters != facts.sequence_parallel:
        raise LoraError(
            plan.host_module,
            reason=f"reduce_scatter_embeddings={scatters}, and the run's sequence_parallel={facts.sequence_parallel}: "
            "its output would be scattered by another, and the gradient of B counted once a rank",
            cure="build the model with scatter_embedding_sequence_parallel, or leave the embedding out of the targets",
        )


def patched_embedding_forward(
    base_forward: Callable[..., torch.Tensor],
    factors: LoraFactors,
    delta: Callable[[torch.Tensor, torch.Tensor, LoraFactors], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """The forward of an embedding, `forward(ids)` -> output, with the branch."""
    add_delta: Any = torch.compiler.disable(delta)

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = base_forward(ids, *args, **kwargs)
        return add_delta(output, ids, factors) if factors.enabled else output

    return forward
