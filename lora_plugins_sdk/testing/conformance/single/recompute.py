"""Activation recompute: the same gradients, also though the embedding is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import compare_factors
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.expectation import one_process
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.observation import local_grads
from lora_plugins_sdk.testing.conformance.observe.session import run_pass, start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
}


def grads_with(
    subject: Subject, directory: Path, problem: Problem, overrides: dict[str, Any], changes: dict[str, Any]
) -> dict[str, Tensor]:
    """In a rank: every factor's gradient of one pass, with these fields of the host's config."""
    session = start_session(subject, directory, problem.factors, overrides=overrides, **changes)
    run_pass(session.chunk, session.run, problem)
    return local_grads(session.adapter)


def _recompute(kind: str, context: Context) -> Iterator[Finding]:
    subject = context.subject
    arguments = (subject, base_directory(subject), make_problem(subject), RECOMPUTE[kind], {})
    (grads,) = context.world(grads_with, Layout(), *arguments)
    table = subject.table(RunFacts())
    what = f"gradient with {kind} recompute"
    yield from compare_factors(context, what, grads, one_process(context).grads, table)
    if any(plan.site.embedding for plan in table.plans):
        yield from _embedding_frozen(context, RECOMPUTE[kind], f"{what} and a frozen embedding")


def _embedding_frozen(context: Context, recompute: dict[str, Any], what: str) -> Iterator[Finding]:
    """Without the embedding's adapter nothing before the first recomputed block asks for a gradient."""
    subject = context.subject
    embeddings = {one.hf for site in subject.selected.architecture.sites if site.embedding for one in site.projections}
    changes = {"target_modules": tuple(one for one in subject.targets() if one not in embeddings)}
    arguments = (subject, base_directory(subject), make_problem(subject, **changes))
    runs: list[dict[str, Tensor]] = []
    for overrides in ({}, recompute):
        (grads,) = context.world(grads_with, Layout(), *arguments, overrides, changes)
        runs.append(grads)
    plain, recomputed = runs
    yield from compare_factors(context, what, recomputed, plain, subject.table(RunFacts(), **changes))


CHECKS = tuple(
    Check(
        name=f"recompute-{kind}",
        level=Level.SINGLE,
        proves=f"With {kind} activation recompute every factor gets the gradient that it gets without.",
        run=partial(_recompute, kind),
        needs=("build-model", "recompute"),
    )
    for kind in RECOMPUTE
)
