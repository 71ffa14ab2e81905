"""bfloat16: the adapter adds no error beyond what bfloat16 costs the base.

Of a model with routed experts every token goes to all of them here: else rounding sends some to other experts, and no
comparison with single precision means anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lora_plugins_sdk.attachment import attach
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_import import import_adapter
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.expectation import one_process
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.observation import local_factors, local_grads
from lora_plugins_sdk.testing.conformance.observe.session import Session, build_base, forward_logits, run_pass, wrap
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.reference import base_directory, make_reference
from lora_plugins_sdk.testing.conformance.single.base import transformers_logits
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout, current_run

ALLOWANCE = 2.0
"""Logits may err this many times as much as the base's alone, and a gradient as much as transformers' with the folded
weights in bfloat16: the branch is one more rounding at every linear."""

_GRADIENT_BOUND = 0.25
"""What any gradient may err: it holds where transformers happens to err less than usual."""

_CHOSEN_EXPERTS = "num_experts_per_tok"  # transformers' name in every family


def _in_bfloat16(
    subject: Subject, directory: Path, problem: Problem
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, str]]:
    base = forward_logits(build_base(subject, directory, dtype=torch.bfloat16), problem)
    model = build_base(subject, directory, dtype=torch.bfloat16)
    adapter = attach(model, subject.selected, subject.hf_config, subject.lora(), current_run())
    model.bfloat16()  # what megatron-core's Float16Module does to the model that it wraps
    import_adapter(model, peft_adapter(subject, problem.factors))
    dtypes = {key: str(value.dtype).removeprefix("torch.") for key, value in local_factors(adapter).items()}
    adapted = forward_logits(model, problem)
    session = Session(model=model, chunk=wrap(model), adapter=adapter)
    run_pass(session.chunk, session.run, problem)
    return base.float(), adapted.float(), local_grads(adapter), dtypes


def _bfloat16(context: Context) -> Iterator[Finding]:
    subject = _without_choice(context.subject)
    seen = one_process(Context(subject, around=context.around, world_seconds=context.world_seconds))
    arguments = (subject, base_directory(subject), make_problem(subject))
    ((base, adapted, grads, dtypes),) = context.world(_in_bfloat16, Layout(), *arguments)
    error = _mean_error(adapted, seen.logits)
    bound = ALLOWANCE * _mean_error(base, transformers_logits(subject))
    if not error <= bound:
        cause = "the branch loses precision: factors or the r-wide product are rounded more than the base is"
        yield Finding(what="bfloat16 logits", error=error, bound=bound, cause=cause)
    own = make_reference(subject, make_problem(subject), dtype=torch.bfloat16).grads
    for row in subject.table(RunFacts()).rows:
        context.exercised([row.host_module])
        if dtypes[row.init_key] != row.dtype:
            cause = f"has dtype {dtypes[row.init_key]} after the model was cast, not {row.dtype}: small steps are lost"
            yield factor_finding("factor in a bfloat16 model", row, cause=cause)
        expected = seen.grads[row.init_key]
        error = _mean_error(grads[row.init_key], expected)
        bound = max(_GRADIENT_BOUND, ALLOWANCE * _mean_error(own[row.init_key], expected))
        if not error <= bound:
            cause = "the gradient is not the float32 one within bfloat16's error"
            yield factor_finding("bfloat16 gradient", row, error=error, bound=bound, cause=cause)


def _without_choice(subject: Subject) -> Subject:
    """The subject with as many chosen experts as there are."""
    dims = subject.selected.architecture.dims(subject.hf_config)
    experts = {dims.resolve(site.experts) for site in subject.selected.architecture.sites if site.experts}
    if not experts:
        return subject
    if _CHOSEN_EXPERTS not in subject.hf_config or len(experts) > 1:
        raise LoraError(
            f"architecture {subject.architecture!r}",
            reason=f"its tiny config has no one {_CHOSEN_EXPERTS}, so not every token can be sent to all experts",
            cure="put 'bfloat16' into the architecture's lacks, with this as the reason",
        )
    return replace(subject, config_json=json.dumps({**subject.hf_config, _CHOSEN_EXPERTS: experts.pop()}))


def _mean_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


CHECKS = (
    Check(
        name="bfloat16",
        level=Level.SINGLE,
        proves="In bfloat16 the adapted model errs as the base's own rounding explains; factors keep their dtype.",
        run=_bfloat16,
        needs=("build-model", "bfloat16"),
    ),
)
