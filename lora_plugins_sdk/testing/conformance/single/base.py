"""The frozen base: declared widths and the loaded weights, before any adapter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import SitePlan
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import compare_logits
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.hf_weights import hf_weight
from lora_plugins_sdk.testing.conformance.observe.session import build_base, forward_logits
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory, new_model
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout


def base_logits(subject: Subject, directory: Path, problem: Problem) -> Tensor:
    """In a rank: logits of the base alone, `[microbatches, samples, tokens, vocabulary]`."""
    return forward_logits(build_base(subject, directory), problem)


@cache
def transformers_logits(subject: Subject) -> Tensor:
    """The same by transformers."""
    model, problem = new_model(subject), make_problem(subject)
    with torch.no_grad():
        return torch.stack([model(tokens).logits for tokens in problem.tokens])


def _base(context: Context) -> Iterator[Finding]:
    subject = context.subject
    (actual,) = context.world(base_logits, Layout(), subject, base_directory(subject), make_problem(subject))
    context.exercised(row.host_module for row in subject.table(RunFacts()).rows)
    yield from compare_logits(
        "base logits",
        actual,
        transformers_logits(subject),
        "the base itself differs from transformers: look at base_weights, the packs and lora_build_model",
    )


def _widths(context: Context) -> Iterator[Finding]:
    model = new_model(context.subject)
    for plan in context.subject.table(RunFacts()).plans:
        context.exercised([plan.host_module])
        for position in range(len(plan.adapted)):
            yield from _width(model, plan, position)


def _width(model: Any, plan: SitePlan, position: int) -> Iterator[Finding]:
    pair = (plan.rows[position], plan.rows[position + len(plan.adapted)])
    try:
        shape = hf_weight(model, plan, position).value.shape
    except AttributeError:
        for row in pair:
            yield factor_finding("projection", row, cause="transformers has no such module with a weight")
        return
    for row, axis in zip(pair, (-1, -2), strict=True):
        if row.full_shape[axis] != shape[axis]:
            cause = f"declared {row.full_shape[axis]} wide, the weight of transformers is {list(shape)}"
            yield factor_finding("input width" if axis == -1 else "output width", row, cause=cause)


CHECKS = (
    Check(
        name="widths",
        level=Level.SINGLE,
        proves="Every projection is a module of the transformers model, of the declared widths.",
        run=_widths,
        needs=("fold",),
    ),
    Check(
        name="base",
        level=Level.SINGLE,
        proves="The base that the plugin builds and loads gives transformers' logits.",
        run=_base,
        needs=("build-model",),
    ),
)
