"""The standard run on one GPU, with Transformer Engine where it is installed, against the same run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import compare_factors, compare_logits, compare_outputs
from lora_plugins_sdk.testing.conformance.context import Context, in_rank
from lora_plugins_sdk.testing.conformance.device.alone import run_alone
from lora_plugins_sdk.testing.conformance.expectation import Expectation, expectation_of, one_process
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.observation import RankObservation, observe
from lora_plugins_sdk.testing.conformance.problem import make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory

BOUND = 2e-2
"""Transformer Engine multiplies float32 in TF32, which has 10 bits of mantissa."""

_SECONDS = 300.0


def on_device(context: Context) -> RankObservation:
    """The standard run in a process of its own, on the device that torch finds there."""
    subject = context.subject
    arguments = (context.around, observe, (subject, base_directory(subject), make_problem(subject)))
    return context.keep("device", lambda: run_alone(in_rank, *arguments, timeout=_SECONDS))


def compare_with_cpu(context: Context, seen: Expectation, bound: float) -> Iterator[Finding]:
    """Forward, backward and two steps of one process on two devices."""
    alone, table = one_process(context), context.subject.table(RunFacts())
    options = {"context": context, "table": table, "bound": bound}
    yield from compare_outputs(what="output", actual=seen.outputs, expected=alone.outputs, **options)
    yield from compare_logits("logits", seen.logits, alone.logits, "see the first output that differs", bound=bound)
    grads = (seen.output_grads, alone.output_grads)
    yield from compare_outputs(what="output gradient", actual=grads[0], expected=grads[1], backward=True, **options)
    yield from compare_factors(what="gradient", actual=seen.grads, expected=alone.grads, **options)
    yield from compare_factors(what="factor after two steps", actual=seen.stepped, expected=alone.stepped, **options)


def _gpu(context: Context) -> Iterator[Finding]:
    yield from compare_with_cpu(context, expectation_of(context, on_device(context)), BOUND)


def _transformer_engine(context: Context) -> Iterator[Finding]:
    for site, linear in on_device(context).linears.items():
        context.exercised([site])
        if not linear.startswith("megatron.core.extensions.transformer_engine"):
            cause = f"is a {linear}: this model is not built on Transformer Engine, though that is installed"
            yield Finding(what="host linear", site=site, cause=cause)


def _no_gpu(context: Context) -> str | None:
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def _no_transformer_engine(context: Context) -> str | None:
    missing = None if find_spec("transformer_engine") else "transformer_engine is not installed"
    return _no_gpu(context) or missing


CHECKS = (
    Check(
        name="gpu",
        level=Level.DEVICE,
        proves="On a GPU outputs, gradients and two steps are those of the CPU.",
        run=_gpu,
        needs=("build-model",),
        unavailable=_no_gpu,
    ),
    Check(
        name="transformer-engine",
        level=Level.DEVICE,
        proves="On a GPU with Transformer Engine the adapted linears are Transformer Engine's.",
        run=_transformer_engine,
        needs=("build-model",),
        unavailable=_no_transformer_engine,
    ),
)
