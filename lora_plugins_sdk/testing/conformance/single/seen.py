"""A plain forward of one process, site by site, so that two of them can be compared where they part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import Site
from lora_plugins_sdk.testing.conformance.compare import EXACT, compare_logits
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.capture import capturing, places_of
from lora_plugins_sdk.testing.conformance.observe.session import forward_logits
from lora_plugins_sdk.testing.conformance.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Logits `[microbatches, samples, tokens, vocabulary]`, and each linear's output by host module."""

    logits: Tensor
    outputs: dict[str, Tensor]


def forward_seen(model: nn.Module, sites: Iterable[Site], problem: Problem) -> Seen:
    """In a rank: a forward without a schedule.

    Args:
        model: with or without an adapter.
        sites: those whose linears to watch.
        problem: gives the tokens.
    """
    with capturing(places_of([model], sites)) as captured:
        logits = forward_logits(model, problem)
    return Seen(logits=logits, outputs={name: torch.stack(seen) for name, seen in captured.outputs.items()})


def compare_seen(context: Context, what: str, actual: Seen, expected: Seen, cause: str) -> Iterator[Finding]:
    """Bit for bit: the first linear of the forward pass whose output differs, or the logits if none does."""
    for plan in context.subject.table(RunFacts()).plans:
        site = plan.host_module
        context.exercised([site])
        if not torch.equal(actual.outputs[site], expected.outputs[site]):
            error = relative_error(actual.outputs[site], expected.outputs[site])
            yield Finding(what=f"output {what}", site=site, error=error, bound=EXACT, cause=cause)
            return
    yield from compare_logits(f"logits {what}", actual.logits, expected.logits, cause, bound=EXACT)
