"""Opt-outs: named capabilities with a reason, and an unexpected pass fails."""

from dataclasses import replace

import pytest

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.testing import Layout
from lora_plugins_sdk.testing.conformance import Case, Check, Context, Finding, Level, Status, Subject, cases, run_case
from lora_plugins_sdk.testing.conformance.capability import CAPABILITIES
from lora_plugins_sdk.testing.conformance.layouts import EXPERT_LAYOUTS, LAYOUTS, needed_capabilities


def _case(*findings: Finding) -> Case:
    check = Check(name="odd", level=Level.STATIC, proves="Nothing.", run=lambda context: findings, needs=("dropout",))
    return Case(check=check, needs=check.needs)


def _subject(**lacks: str) -> Subject:
    return replace(Subject.of("qwen3"), lacks=tuple(lacks.items()))


def test_a_lacking_capability_must_fail() -> None:
    context = Context(_subject(dropout="no generator"))
    failing = run_case(context, _case(Finding(what="mask", cause="missing")))
    assert (failing.status, failing.reason) == (Status.LACKING, "dropout: no generator")
    assert failing.status.good
    passing = run_case(context, _case())
    assert passing.status is Status.UNEXPECTED_PASS
    assert not passing.status.good


def test_without_an_opt_out_the_same_check_fails() -> None:
    context = Context(_subject())
    assert run_case(context, _case(Finding(what="mask", cause="missing"))).status is Status.FAILED
    assert run_case(context, _case()).status is Status.PASSED


def test_an_error_of_the_check_is_a_finding() -> None:
    def broken(context: Context) -> list[Finding]:
        raise KeyError("layer 7")

    check = Check(name="odd", level=Level.STATIC, proves="Nothing.", run=broken)
    result = run_case(Context(_subject()), Case(check=check))
    assert result.status is Status.FAILED
    assert "KeyError: 'layer 7'" in result.findings[0].cause


@pytest.mark.parametrize(
    ("lacks", "words"),
    [({"droput": "x"}, "did you mean 'dropout'"), ({"dropout": " "}, "gives no reason")],
)
def test_opt_outs_that_are_none(lacks: dict[str, str], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        Subject.of("qwen3", lacks=lacks)


def test_every_need_is_a_capability() -> None:
    every = (*LAYOUTS, *EXPERT_LAYOUTS)
    needs = {need for level in Level for case in cases(level, every) for need in case.needs}
    assert needs <= set(CAPABILITIES)
    assert set(CAPABILITIES) <= needs, "a capability that no check needs opts out of nothing"


def test_ids_are_unique() -> None:
    for layouts in (LAYOUTS, EXPERT_LAYOUTS):
        ids = [case.id for level in Level for case in cases(level, layouts)]
        assert len(ids) == len(set(ids))


def test_layouts_say_what_they_need() -> None:
    assert needed_capabilities(Layout()) == ()
    assert needed_capabilities(Layout(tp=2, cp=2, sequence_parallel=True)) == (
        "tensor-parallel",
        "sequence-parallel",
        "context-parallel",
    )
    assert needed_capabilities(Layout(dp=2, ep=2)) == ("data-parallel", "expert-parallel")
    assert all(needed_capabilities(layout) for layout in (*LAYOUTS, *EXPERT_LAYOUTS))
