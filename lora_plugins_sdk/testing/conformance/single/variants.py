"""Other LoRA options than the standard ones: the rank-stabilised scale, and targets that are a part of a pack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import EXPERT
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import compare_factors, compare_logits, compare_outputs, scale_ratios
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.expectation import full_pass
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.observation import Pass, watched_pass
from lora_plugins_sdk.testing.conformance.observe.session import start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory, make_reference
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout


def _pass_with(subject: Subject, directory: Path, problem: Problem, changes: dict[str, Any]) -> Pass:
    return watched_pass(start_session(subject, directory, problem.factors, **changes), problem)


def _rslora(context: Context) -> Iterator[Finding]:
    yield from _variant(context, use_rslora=True)


def _partial(context: Context) -> Iterator[Finding]:
    """The last projection of every site: its siblings within the pack stay as they are."""
    architecture = context.subject.selected.architecture
    wanted = set(context.subject.targets())
    last = [site.projections[-1].hf.format(layer="*", expert=EXPERT) for site in architecture.sites]
    yield from _variant(context, target_modules=tuple(target for target in last if target in wanted))


def _variant(context: Context, **changes: Any) -> Iterator[Finding]:
    subject = context.subject
    problem, table = make_problem(subject, **changes), subject.table(RunFacts(), **changes)
    reference = make_reference(subject, problem, **changes)
    (local,) = context.world(_pass_with, Layout(), subject, base_directory(subject), problem, changes)
    seen = full_pass(table, problem, local)
    forward = list(compare_outputs(context, "output", seen.outputs, reference.outputs, table, deltas=reference.deltas))
    yield from forward
    cause = f"with {', '.join(changes)} the model is not the one with folded weights"
    yield from compare_logits("logits", seen.logits, reference.logits, cause)
    if not forward:
        ratios = scale_ratios(table.lora)
        yield from compare_factors(context, "gradient", seen.grads, reference.grads, table, ratios=ratios)


CHECKS = (
    Check(
        name="rslora",
        level=Level.SINGLE,
        proves="With use_rslora the scale is alpha / sqrt(rank), forward and backward.",
        run=_rslora,
        needs=("build-model", "fold"),
    ),
    Check(
        name="partial-targets",
        level=Level.SINGLE,
        proves="One adapted projection of a pack leaves its siblings alone.",
        run=_partial,
        needs=("build-model", "fold"),
    ),
)
