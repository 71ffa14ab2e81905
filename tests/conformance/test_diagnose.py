"""From a wrong tensor to words: every pattern that the kit claims to recognise."""

import math

import pytest
import torch
from torch import Tensor

from lora_plugins_sdk.testing.conformance.diagnose import NO_PATTERN, Suspects, likely_cause, relative_error


@pytest.fixture
def right() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def test_relative_error(right: Tensor) -> None:
    assert relative_error(right, right) == 0
    assert relative_error(right * 1.5, right) == pytest.approx(0.5)
    assert relative_error(right.t(), right) == math.inf
    assert relative_error(right * math.nan, right) == math.inf
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_a_factor_is_named_by_what_it_means(right: Tensor) -> None:
    suspects = Suspects(ratios={2.0: "summed twice", -1.0: "the sign is wrong"})
    assert likely_cause(right * 2, right, suspects) == "off by the factor 2: summed twice"
    assert likely_cause(-right, right, suspects) == "off by the factor -1: the sign is wrong"
    assert "right direction, wrong scale" in likely_cause(right * 1.7, right, suspects)


def test_parts_of_a_sum(right: Tensor) -> None:
    part = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    suspects = Suspects(peers=[part, right - part])
    assert "sum over the 2 TP ranks is right" in likely_cause(part, right, suspects)
    # Equal halves add up as well, but then each rank holds the whole: a matter of scale.
    halves = Suspects(peers=[right / 2, right / 2], ratios={0.5: "averaged"})
    assert likely_cause(right / 2, right, halves) == "off by the factor 0.5: averaged"


def test_parts_that_several_ranks_hold(right: Tensor) -> None:
    """A sum over the ranks of a smaller group than the right one."""
    part = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    suspects = Suspects(peers=[part, part, right - part, right - part], group="etp_ep")
    assert "the sum of the 2 parts that the 4 ETP_EP ranks hold is right" in likely_cause(part, right, suspects)
    assert "another tag than `etp_ep`" in likely_cause(right - part, right, suspects)
    assert likely_cause(part, right, Suspects(peers=[part] * 4)) == NO_PATTERN


def test_mixed_up_names(right: Tensor) -> None:
    other = torch.randn(8, 6)
    assert "holds the value of layer 1" in likely_cause(other, right, Suspects(others={"layer 1": other}))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([4, 5, 6, 7, 0, 1, 2, 3], "the two halves of its rows are swapped"),
        ([2, 3, 4, 5, 6, 7, 0, 1], "its rows are rotated by 2"),
        ([0, 4, 1, 5, 2, 6, 3, 7], "its rows are interleaved in 2 blocks"),
        ([1, 0, 2, 3, 4, 5, 6, 7], "its rows are permuted: row 0 holds row 1"),
    ],
)
def test_rows_in_another_order(right: Tensor, order: list[int], words: str) -> None:
    assert words in likely_cause(right[order], right)
    assert words.replace("row", "column") in likely_cause(right[order].t(), right.t())


def test_other_shapes_and_values(right: Tensor) -> None:
    assert likely_cause(right.t(), right).endswith("transposed")
    square = right[:6]
    assert likely_cause(square.t(), square) == "transposed"
    assert "another layout" in likely_cause(right[:4], right)
    assert "zero" in likely_cause(torch.zeros_like(right), right)
    assert "NaN" in likely_cause(right * math.nan, right)
    cut = right.clone()
    cut[4:] = 0
    assert "only rows 4 to 7 are wrong and zero (4 of 8)" in likely_cause(cut, right)


def test_what_nothing_explains(right: Tensor) -> None:
    noise = torch.randn(8, 6)
    assert likely_cause(noise, right) == NO_PATTERN
    assert likely_cause(noise, right, Suspects(fallback="look here")) == "look here"
