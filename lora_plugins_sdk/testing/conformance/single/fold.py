"""The branch is `W + scale B A`: values and gradients against folded weights in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import (
    BOUND,
    compare_factors,
    compare_logits,
    compare_outputs,
    scale_ratios,
)
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import relative_error
from lora_plugins_sdk.testing.conformance.expectation import one_process
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.session import forward_logits, start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory, folded_reference, save_folded
from lora_plugins_sdk.testing.conformance.single.base import base_logits
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout


def _outputs(context: Context) -> Iterator[Finding]:
    table = context.subject.table(RunFacts())
    reference, seen = folded_reference(context.subject), one_process(context)
    ratios = scale_ratios(table.lora)
    yield from compare_outputs(context, "output", seen.outputs, reference.outputs, table, deltas=reference.deltas)
    yield from compare_logits(
        "logits", seen.logits, reference.logits, "see `outputs` for the first site", ratios=ratios
    )


def _gradients(context: Context) -> Iterator[Finding]:
    table = context.subject.table(RunFacts())
    reference, seen = folded_reference(context.subject), one_process(context)
    late = relative_error(seen.logits, reference.logits) > BOUND
    fallback = "the forward pass differs already: `fold` names where that starts" if late else None
    yield from compare_outputs(
        context,
        "output gradient",
        seen.output_grads,
        reference.output_grads,
        table,
        backward=True,
        fallback=fallback,
    )
    reached = {
        name for name, grad in reference.output_grads.items() if relative_error(seen.output_grads[name], grad) > BOUND
    }
    yield from compare_factors(
        context,
        "gradient",
        seen.grads,
        reference.grads,
        table,
        ratios=scale_ratios(table.lora),
        fallback=fallback,
        skip=reached,
    )


def _merge(context: Context) -> Iterator[Finding]:
    subject, problem = context.subject, make_problem(context.subject)
    merged = save_folded(subject, problem)
    (actual,) = context.world(base_logits, Layout(), subject, merged, problem)
    (applied,) = context.world(_applied_logits, Layout(), subject, base_directory(subject), problem)
    context.exercised(row.host_module for row in subject.table(RunFacts()).rows)
    cause = "merging the adapter into a HF checkpoint gives another policy than applying it"
    yield from compare_logits("logits of the merged checkpoint", actual, applied, cause)


def _applied_logits(subject: Subject, directory: Path, problem: Problem) -> Tensor:
    return forward_logits(start_session(subject, directory, problem.factors).model, problem)


_NEEDS = ("build-model", "fold")

CHECKS = (
    Check(
        name="fold",
        level=Level.SINGLE,
        proves="Every projection's output and the logits equal those of folded weights in transformers.",
        run=_outputs,
        needs=_NEEDS,
    ),
    Check(
        name="fold-gradients",
        level=Level.SINGLE,
        proves="Every factor's gradient follows from the folded weight's gradient by the chain rule.",
        run=_gradients,
        needs=_NEEDS,
    ),
    Check(
        name="merge",
        level=Level.SINGLE,
        proves="A checkpoint with the adapter merged in, loaded as a base, gives the adapter's logits.",
        run=_merge,
        needs=_NEEDS,
    ),
)
