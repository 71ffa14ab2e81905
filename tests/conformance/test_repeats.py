"""An error that many checks run into is told whole once, and its causes everywhere."""

import pytest

from lora_plugins_sdk.testing.conformance import Context, Level, Subject, cases, run_case
from lora_plugins_sdk.testing.conformance.report import failure_text

pytestmark = pytest.mark.usefixtures("importable_faults")


@pytest.mark.world
@pytest.mark.parametrize(
    ("level", "names"),
    [
        (Level.SINGLE, ("base", "no-op", "dropout")),
        (Level.PARALLEL, ("tp2-completes", "tp2-gradients", "dp2-completes")),
    ],
)
def test_a_model_that_cannot_be_built_is_told_whole_once(level: Level, names: tuple[str, ...]) -> None:
    context = Context(Subject.of("qwen3"), around="faults:no_model")
    results = [run_case(context, one) for name in names for one in cases(level) if one.id == name]
    first, *others = [failure_text(one) for one in results]
    assert len(others) == 2
    assert "in refuse" in first and "head_dim: odd -> use an even one" in first
    for other in others:
        assert "head_dim: odd -> use an even one" in other, "every problem, not only the title of the list"
        assert f"the same as in {names[0]}" in other and "in refuse" not in other
    again = run_case(context, results[0].case)
    assert "in refuse" in failure_text(again), "a case that is run again is no repetition"


@pytest.mark.world
def test_what_fails_as_declared_is_no_first() -> None:
    """The report shows nothing of it but the plugin's own reason."""
    context = Context(Subject.of("qwen3", lacks={"fold": "one weight for two"}), around="faults:no_model")
    named = {one.id: one for one in cases(Level.SINGLE)}
    declared = next(one for one in named.values() if "fold" in one.needs)
    run_case(context, declared)
    assert "in refuse" in failure_text(run_case(context, named["base"]))
