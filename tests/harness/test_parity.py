"""The parity gate: which token is the worst, across parts and ranks, and when the run ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lora_harness.engines import Completion
from lora_harness.parity import GapReport, gap_report, refuse_gap, worst_of, worst_token
from lora_harness.rollouts import Rollout
from lora_plugins_sdk.errors import LoraError

MASK = torch.tensor([[False, True, True, False], [False, False, True, True]])
ENGINE = torch.tensor([[0.0, -1.0, -2.0, 9.0], [0.0, 9.0, -0.5, -3.0]])


def trainer(**moved: float) -> torch.Tensor:
    """The engine's values, but for tokens named like `r0c1`."""
    values = ENGINE.clone()
    for place, gap in moved.items():
        values[int(place[1]), int(place[3])] += gap
    return values


def test_the_worst_token_is_a_drawn_one():
    found = worst_token(trainer(r0c0=5.0, r0c2=-0.25, r1c3=0.125), ENGINE, MASK, torch.tensor([7, 4]))
    assert found is not None and (found.row, found.column, found.gap) == (7, 2, 0.25)
    assert (found.trainer, found.engine) == (-2.25, -2.0)
    assert worst_token(ENGINE, ENGINE, torch.zeros_like(MASK), torch.tensor([0, 1])) is None


def test_a_value_that_is_no_number_is_the_worst():
    found = worst_token(trainer(r0c1=9.0, r1c2=math.nan), ENGINE, MASK, torch.tensor([0, 1]))
    assert found is not None and (found.row, found.column, found.gap) == (1, 2, math.inf)


def test_the_worst_of_parts_is_the_worst_of_the_whole():
    values, rows = trainer(r0c1=0.1, r1c3=0.2), torch.tensor([0, 1])
    whole = worst_token(values, ENGINE, MASK, rows)
    parts = [worst_token(values[part], ENGINE[part], MASK[part], rows[part]) for part in (slice(0, 1), slice(1, 2))]
    assert worst_of([None, *parts]) == whole is not None
    assert worst_of([None]) is None


@dataclass
class Letters:
    """Text of a token: its letter."""

    def decode_token(self, token_id: int) -> str:
        return chr(ord("a") + token_id)


def rollout(*drawn: int) -> Rollout:
    completion = Completion(token_ids=drawn, logprobs=(0.0,) * len(drawn), finish_reason="length", adapter_version=1)
    return Rollout(prompt_ids=(8, 8, 8), completion=completion, text="", reward=0.0)


def report() -> GapReport:
    """Row 1, whose prompt has three tokens: column 3 predicts the second drawn token."""
    worst = worst_token(trainer(r1c3=0.5), ENGINE, MASK, torch.tensor([0, 1]))
    assert worst is not None
    encoder: Any = Letters()
    return gap_report(worst, step=4, mean=0.01, rollouts=[rollout(0, 1), rollout(2, 3, 4)], encoder=encoder)


def test_the_report_names_token_text_and_place():
    found = report()
    assert (found.token, found.text, found.position, found.completion) == (3, "d", 1, 1)
    assert str(found) == (
        "mean 1.0e-02, max 5.0e-01 at step 5: token 3 'd', number 2 of completion 2, "
        "trainer -2.500000, engine -3.000000"
    )


def test_the_run_ends_above_the_limit_only():
    refuse_gap(report(), None)
    refuse_gap(report(), 0.5)
    with pytest.raises(LoraError, match=r"max_logprob_gap = 0\.4: .*max 5\.0e-01 at step 5: token 3 'd'"):
        refuse_gap(report(), 0.4)
    with pytest.raises(LoraError, match="max inf"):
        refuse_gap(replace(report(), maximum=math.inf), 1e9)
