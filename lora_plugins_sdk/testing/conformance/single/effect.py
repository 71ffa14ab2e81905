"""What trains and what does not: every target has an effect and a gradient, the base has neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.expectation import one_process
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.observation import optimizer_steps
from lora_plugins_sdk.testing.conformance.observe.session import build_base, forward_logits, run_pass, start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout


def _logits_without(subject: Subject, directory: Path, problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the whole adapter, and with the B of one projection at a time set to zero."""
    session = start_session(subject, directory, problem.factors)
    whole, without = forward_logits(session.model, problem), {}
    for factors in session.adapter.factors():
        for row in factors.plan.rows:
            if row.factor == "B":
                kept = factors.local(row).clone()
                factors.local(row).zero_()
                without[row.init_key] = forward_logits(session.model, problem)
                factors.local(row).copy_(kept)
    return whole, without


def _every_target(context: Context) -> Iterator[Finding]:
    subject, seen = context.subject, one_process(context)
    arguments = (subject, base_directory(subject), make_problem(subject))
    ((whole, without),) = context.world(_logits_without, Layout(), *arguments)
    for row in subject.table(RunFacts()).rows:
        context.exercised([row.host_module])
        grad = seen.grads.get(row.init_key)
        if grad is None or not grad.any():
            cause = "is zero: the branch is detached or never called" if grad is not None else "there is no such factor"
            yield factor_finding("gradient", row, cause=cause)
        elif row.factor == "B" and (row.init_key not in without or torch.equal(whole, without[row.init_key])):
            yield factor_finding("effect on the logits", row, cause="none: nothing reads this factor")


def _touched(subject: Subject, directory: Path, problem: Problem) -> dict[str, list[str]]:
    """Names of base tensors by what is wrong with them after two training steps."""
    before = {name: value.clone() for name, value in _state(build_base(subject, directory)).items()}
    session = start_session(subject, directory, problem.factors)
    run_pass(session.chunk, session.run, problem)
    optimizer_steps(session, problem)
    mine = {id(parameter) for parameter in session.adapter.parameters()}
    base = {name: one for name, one in session.model.named_parameters() if id(one) not in mine}
    after = _state(session.model)
    return {
        "requires a gradient, so an optimizer would train it": [n for n, one in base.items() if one.requires_grad],
        "has a gradient": [n for n, one in base.items() if one.grad is not None or hasattr(one, "main_grad")],
        "changed its value in two steps": [n for n in before if n not in after or not torch.equal(before[n], after[n])],
    }


def _state(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _frozen(context: Context) -> Iterator[Finding]:
    subject = context.subject
    arguments = (subject, base_directory(subject), make_problem(subject))
    (touched,) = context.world(_touched, Layout(), *arguments)
    modules = {row.host_module for row in subject.table(RunFacts()).rows}
    context.exercised(modules)
    for problem, names in touched.items():
        for name in names:
            owner = name.rsplit(".", 1)[0]
            yield Finding(what=f"base tensor {name}", cause=problem, site=owner if owner in modules else None)


CHECKS = (
    Check(
        name="every-target",
        level=Level.SINGLE,
        proves="Each projection changes the logits, and both of its factors get a gradient.",
        run=_every_target,
        needs=("build-model",),
    ),
    Check(
        name="frozen",
        level=Level.SINGLE,
        proves="No base tensor requires a gradient, gets one, or changes in two training steps.",
        run=_frozen,
        needs=("build-model",),
    ),
)
