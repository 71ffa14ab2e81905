"""A rank that dies or goes its own way ends the case in time, with every rank's stack in the report."""

import time

import pytest

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.testing.conformance import Case, Context, Level, Status, Subject, cases, run_case
from lora_plugins_sdk.testing.conformance.report import failure_text

pytestmark = pytest.mark.usefixtures("importable_faults")


def _case(name: str) -> Case:
    return next(case for case in cases(Level.PARALLEL) if case.id == name)


@pytest.mark.world
def test_a_dead_rank() -> None:
    context = Context(Subject.of("qwen3"), around="faults:death", world_seconds=60)
    result = run_case(context, _case("tp2-completes"))
    text = failure_text(result)
    assert result.status is Status.FAILED
    assert result.findings[0].rank == 1
    assert "rank 1" in text and "died: exit code 3" in text
    assert "rank 0" in text and "most recent call" in text, "the stack of the rank that waits"
    follows = run_case(context, _case("tp2-gradients"))
    told = str(follows.findings[0])
    assert "died: exit code 3" in told and "the same as in tp2-completes" in told
    assert "most recent call" not in told, "the stacks are shown once"
    assert follows.seconds < 5, "the world is not started again for every check"


@pytest.mark.world
def test_a_rank_that_never_comes() -> None:
    subject = Subject.of("qwen3")
    assert not run_case(Context(subject), _case("tp2+sp-completes")).findings, "ranks are warm, the plugin is right"
    start = time.monotonic()
    context = Context(subject, around="faults:stuck_reduction", world_seconds=40)
    result = run_case(context, _case("tp2+sp-completes"))
    assert time.monotonic() - start < 150
    text = failure_text(result)
    assert "not done after 40 s" in text
    assert "wait_on_rank_1" in text, "where rank 1 sleeps"
    assert "all_reduce" in text, "what rank 0 waits for"


@pytest.mark.parametrize("around", ["no.such.module:fault", "faults:no_such_fault", "faults"])
def test_a_name_that_leads_nowhere_is_refused_at_once(around: str) -> None:
    with pytest.raises(LoraError, match=r"package\.module:factory"):
        Context(Subject.of("qwen3"), around=around)
