"""What every layout must reproduce: the run of one process, in full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.local_view import batch_first, by_projection
from lora_plugins_sdk.testing.conformance.observe.observation import RankObservation, observed
from lora_plugins_sdk.testing.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Full tensors; those of the pass are `[microbatches, samples, tokens, width]`.

    Args:
        logits: without padding columns.
        outputs: by HF module, in HF order.
        output_grads: likewise.
        input_grads: by host module.
        grads, stepped: by `ParamRow.init_key`.
        grad_norm: of all factors together.
        initial, exported: by PEFT name.
    """

    logits: Tensor
    outputs: Mapping[str, Tensor]
    output_grads: Mapping[str, Tensor]
    input_grads: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    stepped: Mapping[str, Tensor]
    grad_norm: float
    initial: Mapping[str, Tensor]
    exported: Mapping[str, Tensor]


def one_process(context: Context) -> Expectation:
    """The standard run in a world of one rank."""
    return context.keep("expectation", lambda: expectation_of(context, observed(context, Layout())[0]))


def expectation_of(context: Context, seen: RankObservation) -> Expectation:
    """What one process saw, in HF terms."""
    facts = RunFacts()
    outputs: dict[str, Tensor] = {}
    output_grads: dict[str, Tensor] = {}
    for plan in context.subject.table(facts).plans:
        for full, captured in ((outputs, seen.captured.outputs), (output_grads, seen.captured.output_grads)):
            full |= by_projection(plan, facts, 0, batch_first(captured[plan.host_module]))
    vocabulary = context.subject.selected.architecture.dims(context.subject.hf_config).resolve("vocab_size")
    norm = torch.stack([grad.double().square().sum() for grad in seen.grads.values()]).sum().sqrt().item()
    return Expectation(
        logits=torch.stack(seen.logits)[..., :vocabulary],
        outputs=outputs,
        output_grads=output_grads,
        input_grads={name: batch_first(grads) for name, grads in seen.captured.input_grads.items()},
        grads=seen.grads,
        stepped=seen.stepped,
        grad_norm=norm,
        initial=seen.initial,
        exported=seen.exported,
    )
