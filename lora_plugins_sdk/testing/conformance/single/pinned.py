"""Projections that a run holds at zero: trained by nothing, and of no effect on the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.gather import gather_factors
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import EXPERT
from lora_plugins_sdk.targets import Candidate, candidates
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import EXACT
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.observation import watched_pass
from lora_plugins_sdk.testing.conformance.observe.session import run_pass, start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout

_STEPS = 2
_WEIGHT_DECAY = 0.1


def _pins(subject: Subject) -> list[Candidate]:
    """The last projection of every site that packs several."""
    wanted = set(subject.targets())
    known = candidates(subject.selected.architecture, subject.hf_config)
    return [
        one
        for one in known
        if len(one.site.projections) > 1 and one.projection is one.site.projections[-1] and _pattern(one) in wanted
    ]


def _pattern(one: Candidate) -> str:
    return one.projection.hf.format(layer="*", expert=EXPERT)


def _trained(
    subject: Subject, directory: Path, problem: Problem, changes: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In a rank: each linear's first output, and the factors after steps of AdamW with weight decay."""
    session = start_session(subject, directory, problem.factors, **changes)
    outputs = {name: seen[0] for name, seen in watched_pass(session, problem).captured.outputs.items()}
    parameters = session.adapter.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=_WEIGHT_DECAY)
    for step in range(_STEPS):
        if step:
            run_pass(session.chunk, session.run, problem)
        for parameter in parameters:
            parameter.grad = vars(parameter)["main_grad"]
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
    return outputs, {row.init_key: full for row, full in gather_factors(session.adapter).items()}


def _pinned(context: Context) -> Iterator[Finding]:
    subject, pins = context.subject, _pins(context.subject)
    patterns, held = tuple(dict.fromkeys(map(_pattern, pins))), {one.hf for one in pins}
    problem, table = make_problem(subject), subject.table(RunFacts())
    zero = {row.init_key for row in table.rows if row.hf_module in held and row.initially_zero}
    problem = Problem(
        tokens=problem.tokens,
        upstream=problem.upstream,
        factors={key: one.zero_() if key in zero else one for key, one in problem.factors.items()},
    )
    without = Problem(
        tokens=problem.tokens,
        upstream=problem.upstream,
        factors={row.init_key: problem.factors[row.init_key] for row in table.rows if row.hf_module not in held},
    )
    arguments = subject, base_directory(subject)
    ((outputs, factors),) = context.world(_trained, Layout(), *arguments, problem, {"pinned_modules": patterns})
    ((alone, expected),) = context.world(_trained, Layout(), *arguments, without, {"exclude_modules": patterns})
    context.exercised(one.host for one in pins)
    late = False
    for name in alone:
        if not torch.equal(outputs[name], alone[name]):
            late = True
            error = relative_error(outputs[name], alone[name])
            cause = "is not what it is without the projections that the run holds at zero"
            yield Finding(what="output beside pinned projections", site=name, cause=cause, error=error, bound=EXACT)
            break
    for row in table.rows:
        if row.hf_module in held:
            if not torch.equal(factors[row.init_key], problem.factors[row.init_key]):
                cause = "is trained although the run holds its projection at zero"
                yield factor_finding("pinned factor", row, cause=cause)
        elif not late and not torch.equal(factors[row.init_key], expected[row.init_key]):
            error = relative_error(factors[row.init_key], expected[row.init_key])
            cause = "depends on what is pinned: without those projections it is trained to other values"
            yield factor_finding("factor beside pinned ones", row, cause=cause, error=error, bound=EXACT)


CHECKS = (
    Check(
        name="pinned",
        level=Level.SINGLE,
        proves="Projections held at zero keep their values in training, and the rest is trained as without them.",
        run=_pinned,
        needs=("build-model",),
        unavailable=lambda context: None if _pins(context.subject) else "no site packs several projections",
    ),
)
