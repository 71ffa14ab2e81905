"""Products per group: one grouped_mm or a loop, the same numbers; and which of the two is chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lora_plugins_sdk.grouped_matmul import Groups, add_grouped_linear, grouped_linear, grouped_outer, use_grouped_mm

CPU = torch.device("cpu")


def plain(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    weights = weight if weight.shape[0] > 1 else weight.expand(len(sizes), -1, -1)
    return torch.cat([one @ matrix.t() for one, matrix in zip(x.split(sizes), weights, strict=True)])


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    width=st.sampled_from([3, 4, 8]),
    out=st.sampled_from([2, 4]),
    shared=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_size_of_group(sizes: list[int], width: int, out: int, shared: bool, seed: int) -> None:
    """Empty groups, no rows at all, widths that grouped_mm takes and that it refuses."""
    draw = torch.Generator().manual_seed(seed)
    rows, count = sum(sizes), 1 if shared else len(sizes)
    x = torch.randn(rows, width, generator=draw)
    weight = torch.randn(count, out, width, generator=draw)
    target = torch.randn(rows, out + 4, generator=draw)
    groups = Groups(sizes, CPU)
    expected = plain(x, weight, sizes)
    torch.testing.assert_close(grouped_linear(x, weight, groups), expected)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_linear(x, turned, groups), expected)
    added = target.clone()
    add_grouped_linear(added[:, 4:], x, weight, groups)
    torch.testing.assert_close(added, torch.cat([target[:, :4], target[:, 4:] + expected], dim=1))
    outer = torch.stack([one.t() @ other for one, other in zip(x.split(sizes), expected.split(sizes), strict=True)])
    expected_outer = outer.sum(0, keepdim=True) if shared else outer
    torch.testing.assert_close(grouped_outer(x, expected, groups, count), expected_outer)


def test_sizes_may_be_a_tensor() -> None:
    groups = Groups(torch.tensor([2, 0, 3]), CPU)
    assert (groups.sizes, groups.rows, groups.ends.tolist()) == ([2, 0, 3], 5, [2, 2, 5])


def chosen(x: Tensor, weight: Tensor, sizes: list[int], in_place: bool = False) -> bool:
    return use_grouped_mm(Groups(sizes, CPU), x, weight, in_place=in_place)


@pytest.mark.parametrize(
    ("x", "weight", "sizes", "expected"),
    [
        (torch.zeros(5, 8), torch.zeros(2, 4, 8), [2, 3], True),
        (torch.zeros(5, 16)[:, 4:12], torch.zeros(2, 4, 8), [2, 3], True),
        (torch.zeros(5, 8), torch.zeros(2, 3, 8), [2, 3], True),
        (torch.zeros(5, 8), torch.zeros(2, 8, 4).transpose(1, 2), [2, 3], True),
        (torch.zeros(5, 8), torch.zeros(2, 8, 3).transpose(1, 2), [2, 3], False),
        (torch.zeros(5, 6), torch.zeros(2, 4, 6), [2, 3], False),
        (torch.zeros(5, 4).bfloat16(), torch.zeros(2, 8, 4).bfloat16(), [2, 3], False),
        (torch.zeros(5, 8).bfloat16(), torch.zeros(2, 8, 8).bfloat16(), [2, 3], True),
        (torch.zeros(5, 1).expand(5, 8), torch.zeros(2, 4, 8), [2, 3], False),
        (torch.zeros(0, 8), torch.zeros(2, 4, 8), [0, 0], False),
        (torch.zeros(6, 8), torch.zeros(2, 4, 8), [2, 3], False),
        (torch.zeros(5, 8).double(), torch.zeros(2, 4, 8).double(), [2, 3], False),
    ],
    ids=[
        "aligned",
        "aligned-slice",
        "odd-output",
        "transposed-weight",
        "transposed-weight-of-12-bytes",
        "rows-of-24-bytes",
        "rank-4-in-bfloat16",
        "rank-8-in-bfloat16",
        "expanded",
        "no-rows",
        "rows-past-the-last-group",
        "double-precision",
    ],
)
def test_where_grouped_mm_is_correct(x: Tensor, weight: Tensor, sizes: list[int], expected: bool) -> None:
    assert chosen(x, weight, sizes) is expected


def test_adding_in_place_is_a_loop_for_large_groups() -> None:
    x, weight = torch.zeros(600, 8), torch.zeros(2, 4, 8)
    assert chosen(x, weight, [300, 300]) and not chosen(x, weight, [300, 300], in_place=True)
    assert chosen(x[:80], weight, [40, 40], in_place=True)
