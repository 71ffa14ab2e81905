"""The hook specification is an interface of its own: a change here needs a new HOOKSPEC_API."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from lora_plugins_sdk import HOOKSPEC_API, defaults, hookspecs

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion


def hooks() -> Iterator[tuple[str, object]]:
    for name, function in vars(hookspecs).items():
        if inspect.isfunction(function) and hasattr(function, f"{hookspecs.PROJECT}_spec"):
            yield name, function


def test_signatures(snapshot: SnapshotAssertion) -> None:
    lines = []
    for name, function in hooks():
        options = getattr(function, f"{hookspecs.PROJECT}_spec")
        first = " firstresult" if options["firstresult"] else ""
        lines.append(f"{name}{inspect.signature(function)}{first}")  # type: ignore[arg-type]
    assert (HOOKSPEC_API, lines) == snapshot


@pytest.mark.parametrize(("name", "function"), list(hooks()))
def test_every_hook_and_parameter_is_documented(name: str, function: object) -> None:
    doc = inspect.getdoc(function) or ""
    assert doc, f"{name} has no docstring"
    for parameter in inspect.signature(function).parameters:  # type: ignore[arg-type]
        assert f":param {parameter}:" in doc, f"{name} does not document {parameter}"


def test_defaults_implement_known_hooks_and_come_last() -> None:
    known = {name for name, _ in hooks()}
    found = {}
    for name, function in vars(defaults).items():
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if options is not None:
            found[options["specname"] or name] = options["trylast"]
    assert set(found) <= known
    assert all(found.values())
