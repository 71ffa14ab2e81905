"""Off and away: `disable_adapters` gives the base's own logits, `detach` the base itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.adapter import disable_adapters
from lora_plugins_sdk.attachment import attach, detach
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_import import import_adapter
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.observe.session import build_base
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.single.seen import Seen, compare_seen, forward_seen
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout, current_run


@dataclass(frozen=True, kw_only=True)
class _Life:
    """A forward at each stage of an adapter's life, and what of the model differs at its end."""

    base: Seen
    on: Seen
    off: Seen
    off_after_inner: Seen
    on_again: Seen
    after_error: Seen
    detached: Seen | None
    attached_again: Seen | None
    differs: list[str]
    attached_twice: bool
    failure: str


def _live(subject: Subject, directory: Path, problem: Problem) -> _Life:
    model = build_base(subject, directory)
    saved, sites = peft_adapter(subject, problem.factors), subject.selected.architecture.sites

    def see() -> Seen:
        return forward_seen(model, sites, problem)

    def put_on() -> None:
        attach(model, subject.selected, subject.hf_config, subject.lora(), current_run())
        import_adapter(model, saved)

    before, base = _traits(model), see()
    put_on()
    twice = True
    try:
        attach(model, subject.selected, subject.hf_config, subject.lora(), current_run())
    except LoraError:
        twice = False
    on = see()
    with disable_adapters(model):
        off = see()
    on_again = see()
    with disable_adapters(model):
        with disable_adapters(model):
            see()
        off_after_inner = see()
    with suppress(KeyError), disable_adapters(model):
        raise KeyError
    after_error = see()
    detach(model)
    after = _traits(model)
    detached = attached_again = None
    failure = ""
    try:
        detached = see()
        put_on()
        attached_again = see()
    except Exception as error:  # what was left behind may break the forward in any way
        failure = f"{type(error).__name__}: {error}"
    return _Life(
        base=base,
        on=on,
        off=off,
        off_after_inner=off_after_inner,
        on_again=on_again,
        after_error=after_error,
        detached=detached,
        attached_again=attached_again,
        differs=[name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))],
        attached_twice=twice,
        failure=failure,
    )


def _traits(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that attaching could leave behind, by name."""
    found: dict[str, Any] = {}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = parameter.detach().clone()
        found[f"{name}.requires_grad"] = parameter.requires_grad
    for name, module in model.named_modules():
        found[f"{name} (module)"] = type(module).__qualname__
        found[f"{name} (patched forward)"] = "forward" in vars(module)
        found[f"{name} (hooks)"] = len(module._forward_pre_hooks) + len(module._forward_hooks)
        found[f"{name}.return_layernorm_output"] = getattr(module, "return_layernorm_output", None)
    return found


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and left == right


def _lived(context: Context) -> _Life:
    subject = context.subject
    arguments = (subject, base_directory(subject), make_problem(subject))
    return context.keep("life", lambda: context.world(_live, Layout(), *arguments)[0])


def _disable(context: Context) -> Iterator[Finding]:
    life = _lived(context)
    leak = "the disabled adapter still acts: reference log-probs would be the policy's"
    yield from compare_seen(context, "while disabled", life.off, life.base, leak)
    stays = "the adapter does not come back as it was"
    yield from compare_seen(context, "after a disabled context", life.on_again, life.on, stays)
    inner = "the inner disable_adapters ended the outer one"
    yield from compare_seen(context, "after a nested context", life.off_after_inner, life.off, inner)
    error = "an error within the context leaves the adapter disabled"
    yield from compare_seen(context, "after an error in a disabled context", life.after_error, life.on_again, error)


def _detach(context: Context) -> Iterator[Finding]:
    life = _lived(context)
    modules = {row.host_module for row in context.subject.table(RunFacts()).rows}
    for name in sorted(life.differs):
        site = next((module for module in modules if name.startswith(module)), None)
        yield Finding(what=f"model after detach: {name}", cause="is not what it was before attach", site=site)
    if life.attached_twice:
        yield Finding(what="second attach", cause="is accepted while an adapter is attached: forwards patched twice")
    if life.failure:
        yield Finding(what="forward after detach, or after attaching again", cause=life.failure)
    if life.detached is not None:
        yield from compare_seen(context, "after detach", life.detached, life.base, "the detached adapter still acts")
    if life.attached_again is not None:
        cause = "attaching after a detach gives another model: something was patched twice"
        yield from compare_seen(context, "when attached again", life.attached_again, life.on, cause)


CHECKS = (
    Check(
        name="disable",
        level=Level.SINGLE,
        proves="A disabled adapter gives the base's logits bit for bit, nested and after errors, and comes back.",
        run=_disable,
        needs=("build-model",),
    ),
    Check(
        name="detach",
        level=Level.SINGLE,
        proves="Detach restores every tensor, flag and forward; attaching again works, attaching twice does not.",
        run=_detach,
        needs=("build-model",),
    ),
)
