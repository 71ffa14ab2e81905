"""Targets: every name that a user may write picks exactly the projections that it says."""

from __future__ import annotations

from collections.abc import Iterator

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.targets import ALL_LINEAR, Candidate, candidates
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding


def _targets(context: Context) -> Iterator[Finding]:
    subject = context.subject
    dims = subject.selected.architecture.dims(subject.hf_config)
    known = candidates(subject.selected.architecture, subject.hf_config)
    free = [one for one in known if one.site.tied is None or not dims.flag(one.site.tied.when)]
    context.exercised(one.host for one in free)
    yield from _picks(context, (ALL_LINEAR,), (), [one for one in free if one.site.all_linear])
    for leaf in dict.fromkeys(one.projection.leaf for one in free):
        of_leaf = [one for one in free if one.projection.leaf == leaf]
        yield from _picks(context, (leaf,), (), of_leaf)
        rest = [one for one in free if one.projection.leaf != leaf]
        if rest:
            yield from _picks(context, subject.targets(), (leaf,), rest)
    for name in dict.fromkeys(one.site.name for one in free):
        yield from _picks(context, (name,), (), [one for one in free if one.site.name == name])
    for one in free:
        yield from _picks(context, (one.hf,), (), [one])
    for region in ("language", "vision"):
        yield from _picks(context, subject.targets(), (), [one for one in free if one.site.region == region], region)


def _picks(
    context: Context, targets: tuple[str, ...], excluded: tuple[str, ...], wanted: list[Candidate], scope: str = "all"
) -> Iterator[Finding]:
    lora = context.subject.lora(target_modules=targets, exclude_modules=excluded, scope=scope)
    try:
        picked = context.subject.selected.normalize_targets(context.subject.hf_config, lora)
    except LoraError as error:
        if wanted:
            yield Finding(what=_asked(targets, excluded, scope), cause=f"is refused: {error}")
        return
    expected = {one.hf: one.host for one in wanted}
    for name in sorted(picked ^ expected.keys()):
        named = "is excluded" if excluded else "it does not name"
        cause = f"leaves out {name}" if name in expected else f"takes {name}, which {named}"
        site = expected.get(name)
        yield Finding(what=_asked(targets, excluded, scope), site=site, projection=name, cause=cause)


def _asked(targets: tuple[str, ...], excluded: tuple[str, ...], scope: str) -> str:
    shown = targets[0] if len(targets) == 1 else "everything"
    return (
        f"target {shown}" + (f" without {excluded[0]}" if excluded else "") + ("" if scope == "all" else f" in {scope}")
    )


CHECKS = (
    Check(
        name="targets",
        level=Level.STATIC,
        proves="all-linear, HF and Megatron names, paths, exclusions and scopes pick what they say, and nothing else.",
        run=_targets,
    ),
)
