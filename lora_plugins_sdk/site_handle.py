"""The default handle on one host linear: factors registered, forward patched on the instance, both removable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.embedding_host import check_embedding_host, patched_embedding_forward
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.expert_host import check_expert_host, patched_expert_forward
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.host_weight import check_weight_shape
from lora_plugins_sdk.input_gradient import BranchInput
from lora_plugins_sdk.pack import QueryGroups
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.sharded_state import patched_sharded_state_dict
from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.table import SitePlan

FACTORS = "lora"


class SiteHandle:
    """One patched linear.

    The host's contract: `forward(x, ...)` returns `(output, bias)`; with a fused norm and `return_layernorm_output`
    set, as in Transformer Engine, `((output, normed input), bias)`. The patched forward returns `(output, bias)`
    always. A grouped linear of experts is called as `forward(x, m_splits)`, an embedding as
    `forward(ids)`, which returns the output alone. Where the linear is another method of the
    module (`Site.method`), that method is patched in place of the forward: it takes the input and returns the output
    alone.

    Args:
        module: the host linear.
        plan: the site with its rows.
        lora: rank, scale, dropout.
        run: this rank's place.
        delta: `delta(base_output, branch_input, factors)`, with experts also `m_splits`.

    Raises:
        LoraError: the linear has an adapter already, or its weight has not the shape that the plan expects.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: SitePlan,
        lora: LoraConfig,
        run: ParallelRun,
        delta: Callable[..., torch.Tensor],
    ) -> None:
        self.module: Any = module
        self.plan = plan
        self._had_norm_output = getattr(module, "return_layernorm_output", None)
        device = next(module.parameters()).device
        self.factors = LoraFactors(plan, lora, run, device)
        self.factors.train(module.training)  # a model in eval mode gets no dropout
        module.add_module(FACTORS, self.factors)
        if plan.site.fused_norm:
            self.module.return_layernorm_output = True
        # Methods of the class, or what another patch left on the instance; remove() puts the latter back.
        self._before: dict[str, Any] = {}
        if plan.site.experts:
            patched = patched_expert_forward(module.forward, self.factors, delta)
        elif plan.site.embedding:
            patched = patched_embedding_forward(module.forward, self.factors, delta)
        elif plan.site.method == "forward":
            patched = _patched_forward(module.forward, self.factors, delta, plan.site.fused_norm)
        else:
            patched = _patched_method(getattr(module, plan.site.method), self.factors, delta)
        self._patch(plan.site.method, patched)
        self._patch("sharded_state_dict", patched_sharded_state_dict(module, self.factors, run, FACTORS))

    def _patch(self, name: str, method: Callable[..., Any]) -> None:
        self._before[name] = self.module.__dict__.get(name)
        setattr(self.module, name, method)

    def remove(self) -> None:
        """Restore the module: no factors, the methods it had, its own norm output setting."""
        for name, before in self._before.items():
            if before is None:
                delattr(self.module, name)
            else:
                setattr(self.module, name, before)
        delattr(self.module, FACTORS)
        if self.plan.site.fused_norm:
            self.module.return_layernorm_output = self._had_norm_output


def check_host(module: nn.Module, plan: SitePlan, facts: RunFacts) -> None:
    """Refuse a module that cannot carry this site's adapter, before anything is changed.

    Raises:
        LoraError: no linear of the expected shape and contract, or already adapted.
    """
    where = plan.host_module
    if hasattr(module, FACTORS):
        raise LoraError(
            where,
            reason="carries an adapter already",
            cure="detach the first adapter before attaching another",
        )
    if plan.site.experts:
        check_expert_host(module, plan, facts)
        return
    if plan.site.embedding:
        check_embedding_host(module, plan, facts)
        return
    weight = getattr(module, "weight", None)
    if plan.site.tied is None or weight is not None:
        check_weight_shape(module, plan, host_weight_shape(plan, facts.tp), facts)
    if not callable(getattr(module, plan.site.method, None)):
        raise LoraError(
            where,
            reason=f"has no method {plan.site.method!r}, which its site names as the linear",
            cure="correct the site's path or method in the plugin's architecture",
        )
    if plan.site.fused_norm and not hasattr(module, "return_layernorm_output"):
        raise LoraError(
            where,
            reason="its norm is not fused into it, or it cannot return the normed input (no `return_layernorm_output`)",
            cure="build the model on Transformer Engine or on lora_plugins_sdk.hosts.torch_backend",
        )
    if not plan.site.fused_norm and hasattr(module, "layer_norm_weight") and hasattr(module, "return_layernorm_output"):
        raise LoraError(
            where,
            reason="normalises its input itself, but its site is declared without a fused norm: the branch would "
            "read the input before the norm",
            cure="declare the site with fused_norm=True in the plugin's architecture",
        )
    split = getattr(weight, "partition_dim", None) if getattr(weight, "tensor_model_parallel", False) else None
    if (plan.site.kind, split) in ((SiteKind.COLUMN, 1), (SiteKind.ROW, 0)):
        raise LoraError(
            where,
            reason=f"tensor parallelism splits its weight along dimension {split}, its site is declared "
            f"{plan.site.kind.name}",
            cure="declare the kind that the host linear has (COLUMN splits dimension 0, ROW dimension 1)",
        )
    groups = getattr(getattr(module, "config", None), "num_query_groups", None)
    if isinstance(plan.site.pack, QueryGroups) and groups is not None and groups != plan.layout.blocks:
        raise LoraError(
            where,
            reason=f"was built with num_query_groups={groups}, the HF config gives {plan.site.pack.groups}="
            f"{plan.layout.blocks}: its rows are interleaved otherwise",
            cure="attach with the config.json that the model was built with",
        )
    gate = getattr(getattr(module, "config", None), "attention_output_gate", None)
    if (
        isinstance(plan.site.pack, QueryGroups)
        and gate is not None
        and gate != (plan.site.pack.gated_heads is not None)
    ):
        raise LoraError(
            where,
            reason=f"was built with attention_output_gate={gate}, its site is declared "
            f"{'without' if gate else 'with'} gated heads: its rows are interleaved otherwise",
            cure="declare QueryGroups(gated_heads=...) exactly for a model with output gates",
        )
    if getattr(module, "sequence_parallel", facts.sequence_parallel) != facts.sequence_parallel:
        raise LoraError(
            where,
            reason=f"was built with sequence_parallel={not facts.sequence_parallel}, the run says otherwise",
            cure="attach with the parallel options that the model was built with",
        )
    if getattr(module, "gather_output", False):
        raise LoraError(
            where,
            reason="gathers its output over TP, and the delta is added per shard",
            cure="build it with gather_output=False",
        )
    if facts.tp > 1 and plan.site.kind is not SiteKind.REPLICATED and _leaves_communication_out(module):
        raise LoraError(
            where,
            reason="leaves its communication over TP to its caller (shared-expert overlap), and the branch would "
            "communicate a second time",
            cure="build the model without moe_shared_expert_overlap",
        )


def _leaves_communication_out(module: nn.Module) -> bool:
    """Whether a linear that TP splits neither gathers nor sums: megatron-core's own, or Transformer Engine's."""
    return getattr(module, "explicit_expert_comm", False) or getattr(module, "parallel_mode", "") is None


def host_weight_shape(plan: SitePlan, tp: int) -> tuple[int, int]:
    """Local shape `[out, in]` of the host weight."""
    width = plan.rows[0].local_shape[1]
    return plan.layout.host_rows // (tp if plan.rows[-1].partition_dim == 0 else 1), width


def _patched_forward(
    base_forward: Callable[..., Any],
    factors: LoraFactors,
    delta: Callable[[torch.Tensor, torch.Tensor, LoraFactors], torch.Tensor],
    fused_norm: bool,
) -> Callable[..., Any]:
    # The branch mutates a buffer and may communicate: it runs as it is, also within a compiled model.
    add_delta: Any = torch.compiler.disable(delta)
    # Only the linear and the branch may read a marked input; a normed input may have further readers within the host.
    mark_input: Any = torch.compiler.disable(BranchInput.apply)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if kwargs.get("runtime_gather_output"):
            raise LoraError(
                factors.plan.host_module,
                reason="was asked to gather its output over TP, and the delta is added per shard",
                cure="call it without runtime_gather_output and gather the adapted output",
            )
        if factors.enabled and not fused_norm:
            x = mark_input(x)
        output, bias = base_forward(x, *args, **kwargs)
        branch_input = x
        if fused_norm:
            output, branch_input = output
        if factors.enabled:
            output = add_delta(output, branch_input, factors)
        return output, bias

    return forward


def _patched_method(
    base_method: Callable[..., torch.Tensor],
    factors: LoraFactors,
    delta: Callable[[torch.Tensor, torch.Tensor, LoraFactors], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    add_delta: Any = torch.compiler.disable(delta)
    mark_input: Any = torch.compiler.disable(BranchInput.apply)

    def method(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not factors.enabled:
            return base_method(x, *args, **kwargs)
        x = mark_input(x)
        output = base_method(x, *args, **kwargs)
        # A router computes in a wider dtype than its input's; its branch does so too.
        return add_delta(output, x.to(output.dtype), factors)

    return method
