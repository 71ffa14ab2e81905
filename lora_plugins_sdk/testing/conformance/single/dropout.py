"""LoRA dropout: seeded, replayed by recompute, absent in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import EXACT, compare_factors, compare_logits
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import relative_error
from lora_plugins_sdk.testing.conformance.expectation import one_process
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.session import forward_logits, start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.single.recompute import RECOMPUTE, grads_with
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout

DROPOUT: dict[str, Any] = {"dropout": 0.25}


def _draws(subject: Subject, directory: Path, problem: Problem) -> dict[str, Tensor]:
    model = start_session(subject, directory, problem.factors, **DROPOUT).model
    found = {}
    model.train()
    for name, seed in (("first", 1), ("same seed", 1), ("other seed", 2)):
        torch.manual_seed(seed)
        found[name] = forward_logits(model, problem)
    model.eval()
    return found | {"evaluation": forward_logits(model, problem)}


def _seeded(context: Context) -> Iterator[Finding]:
    subject, seen = context.subject, one_process(context)
    (logits,) = context.world(_draws, Layout(), subject, base_directory(subject), make_problem(subject))
    context.exercised(row.host_module for row in subject.table(RunFacts()).rows)
    cause = "the mask does not follow torch's seed"
    yield from compare_logits("logits drawn twice alike", logits["same seed"], logits["first"], cause, bound=EXACT)
    for name in ("first", "other seed"):
        like = "evaluation" if name == "first" else "first"
        if relative_error(logits[name], logits[like]) == 0:
            yield Finding(what=f"logits of the {name} draw", cause=f"equal those of {like}: nothing is dropped")
    cause = "evaluation drops too: rollouts and training would see different policies"
    yield from compare_logits("logits in evaluation mode", logits["evaluation"], seen.logits, cause)


def _replayed(context: Context) -> Iterator[Finding]:
    subject, problem = context.subject, make_problem(context.subject)
    directory = base_directory(subject)
    runs: list[dict[str, Tensor]] = []
    options: list[dict[str, Any]] = [{}, RECOMPUTE["full"]]
    for overrides in options:  # ranks start every case with the same seed
        (grads,) = context.world(grads_with, Layout(), subject, directory, problem, overrides, DROPOUT)
        runs.append(grads)
    plain, recomputed = runs
    table = subject.table(RunFacts(), **DROPOUT)
    yield from compare_factors(context, "gradient with dropout and recompute", recomputed, plain, table)


CHECKS = (
    Check(
        name="dropout",
        level=Level.SINGLE,
        proves="Dropout follows the seed in training and is absent in evaluation.",
        run=_seeded,
        needs=("build-model", "dropout"),
    ),
    Check(
        name="dropout-recompute",
        level=Level.SINGLE,
        proves="Recompute replays the very masks of the first forward.",
        run=_replayed,
        needs=("build-model", "dropout", "recompute"),
    ),
)
