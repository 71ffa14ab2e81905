"""Run facts: how the ranks of a stage are counted for dense layers and for experts."""

from __future__ import annotations

from typing import Any

import pytest

from lora_plugins_sdk import LoraError, RunFacts


def test_experts_share_the_tensor_parallel_size_unless_told_otherwise() -> None:
    facts = RunFacts(tp=2, dp=2, sequence_parallel=True)
    assert (facts.etp, facts.expert_dp, facts.experts_apart) == (2, 2, False)


@pytest.mark.parametrize(
    ("facts", "expert_dp"),
    [
        (RunFacts(dp=4, ep=2), 2),
        (RunFacts(tp=2, etp=1), 2),
        (RunFacts(tp=2, dp=2, ep=4, etp=1), 1),
        (RunFacts(tp=1, dp=2, etp=2), 1),
        (RunFacts(tp=2, pp=3, dp=2, ep=2, etp=2), 1),
    ],
    ids=str,
)
def test_experts_may_live_in_a_data_parallel_domain_of_their_own(facts: RunFacts, expert_dp: int) -> None:
    """B6: with EP = 1 and ETP != TP too."""
    assert (facts.expert_dp, facts.experts_apart) == (expert_dp, True)
    assert facts.etp * facts.ep * facts.expert_dp * facts.pp == facts.world_size


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 4}, {"tp": 4, "etp": 3}], ids=str)
def test_sizes_that_do_not_divide_a_stage_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(LoraError, match=r"expert parallel size .* does not divide the \d ranks of a pipeline stage"):
        RunFacts(**sizes)


@pytest.mark.parametrize("name", ["ep", "etp", "make_vocab_size_divisible_by"])
@pytest.mark.parametrize("value", [0, True])
def test_what_is_no_size_is_refused(name: str, value: object) -> None:
    """True is 1 to Python, and another text in the digest that ranks compare."""
    with pytest.raises(LoraError, match=f"{name}: {value!r} is not a positive integer"):
        RunFacts(**{name: value})  # type: ignore[arg-type]
