"""What every layout must reproduce: the run of one process, in full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParameterTable
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.expert_view import sum_of_microbatches
from lora_plugins_sdk.testing.conformance.local_view import batch_first, by_projection
from lora_plugins_sdk.testing.conformance.observe.observation import Pass, RankObservation, observed
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.layout import Layout


@dataclass(frozen=True, kw_only=True)
class FullPass:
    """One pass in full tensors, those of the pass `[microbatches, samples, tokens, width]`; of routed experts sums over
    all tokens, `[experts, width]`.

    Args:
        logits: without padding columns.
        outputs: by HF module, in HF order.
        output_grads: likewise.
        input_grads: by host module.
        grads: by `ParamRow.init_key`.
    """

    logits: Tensor
    outputs: Mapping[str, Tensor]
    output_grads: Mapping[str, Tensor]
    input_grads: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Expectation(FullPass):
    """The standard run: its first pass, and what follows.

    Args:
        stepped: factors after two steps, by `ParamRow.init_key`.
        grad_norm: of all factors together.
        initial: exported, by PEFT name.
    """

    stepped: Mapping[str, Tensor]
    grad_norm: float
    initial: Mapping[str, Tensor]


def one_process(context: Context) -> Expectation:
    """The standard run in a world of one rank."""
    return context.keep("expectation", lambda: expectation_of(context, observed(context, Layout())[0]))


def expectation_of(context: Context, seen: RankObservation) -> Expectation:
    """What one process saw, in HF terms."""
    first = full_pass(context.subject.table(RunFacts()), make_problem(context.subject), seen)
    norm = torch.stack([grad.double().square().sum() for grad in seen.grads.values()]).sum().sqrt().item()
    return Expectation(
        **{one.name: getattr(first, one.name) for one in fields(first)},
        stepped=seen.stepped,
        grad_norm=norm,
        initial=seen.initial,
    )


def full_pass(table: ParameterTable, problem: Problem, local: Pass) -> FullPass:
    """A pass of one process, its linears' outputs taken apart into HF projections."""
    full: dict[str, dict[str, Tensor]] = {"outputs": {}, "output_grads": {}, "input_grads": {}}
    for plan in table.plans:
        for quantity, found in full.items():
            if plan.site.embedding and quantity == "input_grads":
                continue  # ids have none
            captured = getattr(local.captured, quantity)[plan.host_module]
            value = sum_of_microbatches(captured) if plan.site.experts else batch_first(captured)
            found |= (
                {plan.host_module: value} if quantity == "input_grads" else by_projection(plan, RunFacts(), 0, value)
            )
    return FullPass(
        logits=torch.stack(local.logits)[..., : problem.upstream.shape[-1]],
        grads=local.grads,
        **full,
    )
