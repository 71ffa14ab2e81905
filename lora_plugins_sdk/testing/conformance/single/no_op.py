"""A fresh adapter: it changes nothing, and its initial values are what they must be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lora_plugins_sdk.attachment import attach
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParamRow
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.observation import local_factors
from lora_plugins_sdk.testing.conformance.observe.session import build_base
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.single.seen import Seen, compare_seen, forward_seen
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout, current_run

# A sample's standard deviation strays by about 0.45 / sqrt(entries) of itself when uniform, 0.71 when normal.
_STRAY, _STRAY_NORMAL = 5 * 0.45, 5 * 0.71


def _before_and_after(subject: Subject, directory: Path, problem: Problem) -> tuple[Seen, Seen, dict[str, Tensor]]:
    model = build_base(subject, directory)
    before = forward_seen(model, subject.selected.architecture.sites, problem)
    adapter = attach(model, subject.selected, subject.hf_config, subject.lora(), current_run())
    return before, forward_seen(model, subject.selected.architecture.sites, problem), local_factors(adapter)


def _fresh(context: Context) -> tuple[Seen, Seen, dict[str, Tensor]]:
    subject = context.subject
    arguments = (subject, base_directory(subject), make_problem(subject))
    return context.keep("fresh", lambda: context.world(_before_and_after, Layout(), *arguments)[0])


def _no_op(context: Context) -> Iterator[Finding]:
    before, after, _ = _fresh(context)
    cause = "neither factor is zero at the start, or the patched forward changes the base's own output"
    yield from compare_seen(context, "with a fresh adapter", after, before, cause)


def _initial(context: Context) -> Iterator[Finding]:
    _, _, factors = _fresh(context)
    seen: dict[bytes, ParamRow] = {}
    for row in context.subject.table(RunFacts()).rows:
        context.exercised([row.host_module])
        value = factors.get(row.init_key)
        if value is None or tuple(value.shape) != row.full_shape:
            shape = None if value is None else list(value.shape)
            yield factor_finding("initial value", row, cause=f"has shape {shape}, not {list(row.full_shape)}")
            continue
        if row.initially_zero:
            if value.any():
                yield factor_finding("initial value", row, cause="is not zero, so a fresh adapter changes the policy")
            continue
        expected, scheme = 1.0, "a normal draw of unit variance has"
        if not row.embedding:
            expected = 1 / math.sqrt(3 * row.full_shape[-1])
            scheme = f"Kaiming-uniform gives over the full fan-in {row.full_shape[-1]}"
        stray = _STRAY_NORMAL if row.embedding else _STRAY
        error, bound = abs(value.std().item() / expected - 1), stray / math.sqrt(value.numel())
        if not error <= bound:
            yield factor_finding(
                "initial spread",
                row,
                error=error,
                bound=bound,
                cause=f"standard deviation {value.std().item():.3g} instead of {expected:.3g}, which {scheme} "
                "(a local fan-in, or another scheme)",
            )
        halves = value.chunk(2, dim=-1)
        if halves[0].shape == halves[-1].shape and len(halves) == 2 and torch.equal(*halves):
            yield factor_finding("initial value", row, cause="its two halves are equal: shards drawn alike")
        for one in value if row.expert else [value]:
            twin = seen.get(one.numpy().tobytes())
            if twin is not None:
                yield factor_finding("initial value", row, cause=f"equals that of {twin.init_key}: one key for both")
            seen.setdefault(one.numpy().tobytes(), row)


CHECKS = (
    Check(
        name="no-op",
        level=Level.SINGLE,
        proves="A fresh adapter leaves the logits bit for bit as they are.",
        run=_no_op,
        needs=("build-model",),
    ),
    Check(
        name="initial",
        level=Level.SINGLE,
        proves="B starts at zero; every A is drawn on its own, Kaiming-uniform over the full fan-in. Of an embedding A "
        "starts at zero, and B is normal.",
        run=_initial,
        needs=("build-model",),
    ),
)
