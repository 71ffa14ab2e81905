"""Products of token rows, sorted by group, with one small matrix per group.

Each is `torch.nn.functional.grouped_mm` where that is correct and pays, else a loop over the groups; `use_grouped_mm`
alone decides. A weight with one matrix for all groups (`[1, ...]`) is an ordinary product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes; grouped_mm refuses rows that start elsewhere
# On a CPU, rows per group from which a loop that accumulates in place is as fast as grouped_mm, whose result must be
# added afterwards (`python -m benchmarks.grouped_experts`: with 128 rows grouped_mm is 4 % ahead, with 512 behind).
_ROWS_FOR_IN_PLACE = 256


class Groups:
    """How many consecutive rows belong to each group.

    Args:
        sizes: rows per group, as Python integers or a tensor; zeros are allowed.
        device: where the rows live.
    """

    def __init__(self, sizes: Sequence[int] | torch.Tensor, device: torch.device) -> None:
        self.sizes: list[int] = sizes.tolist() if isinstance(sizes, torch.Tensor) else list(sizes)
        self.rows = sum(self.sizes)
        # grouped_mm takes the end of each group.
        self.ends = torch.tensor(self.sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def slices(self, *tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """Number of each group that has rows, and its rows of every tensor."""
        start = 0
        for number, size in enumerate(self.sizes):
            if size:
                yield number, tuple(tensor[start : start + size] for tensor in tensors)
            start += size


def use_grouped_mm(groups: Groups, *operands: torch.Tensor, in_place: bool) -> bool:
    """Whether one grouped_mm is correct for these operands and faster than a loop over the groups.

    It takes contiguous innermost rows that start at multiples of 16 bytes (so rank 4 in bfloat16 is out), and leaves
    rows past the last group uninitialised, so there must be none.

    Args:
        groups: the groups.
        operands: what is multiplied, as grouped_mm gets it, but for transposes.
        in_place: whether the result is to be added to something.
    """
    if not hasattr(F, "grouped_mm") or operands[0].dtype not in _DTYPES:
        return False
    if groups.rows == 0 or operands[0].shape[0] != groups.rows:
        return False
    if in_place and operands[0].device.type == "cpu" and groups.rows >= _ROWS_FOR_IN_PLACE * len(groups.sizes):
        return False
    return all(_aligned(operand) for operand in operands)


def _aligned(tensor: torch.Tensor) -> bool:
    """Rows start at multiples of 16 bytes; of a weight, rows or columns."""
    if tensor.dim() == 3 and tensor.stride(-1) != 1:
        tensor = tensor.transpose(1, 2)
    size = tensor.element_size()
    strides = tensor.stride()
    return (
        strides[-1] == 1
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(stride > 0 and stride * size % _ALIGNMENT == 0 for stride in strides[:-1])
    )


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`x @ weight[g].T` for the rows of each group g.

    Args:
        x: `[rows, in]`.
        weight: `[groups, out, in]`, or `[1, out, in]` for all.
        groups: rows of each group.

    Returns:
        `[rows, out]`.
    """
    if weight.shape[0] == 1:
        return x @ weight[0].t()
    if use_grouped_mm(groups, x, weight, in_place=False):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    result = x.new_zeros(x.shape[0], weight.shape[1])
    for number, (rows, out) in groups.slices(x, result):
        torch.mm(rows, weight[number].t(), out=out)
    return result


def add_grouped_linear(target: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> None:
    """`target += x @ weight[g].T` for the rows of each group g, in place; shapes as for `grouped_linear`."""
    if weight.shape[0] == 1:
        target.addmm_(x, weight[0].t())
    elif use_grouped_mm(groups, x, weight, in_place=True):
        target.add_(F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends))
    else:
        for number, (out, rows) in groups.slices(target, x):
            out.addmm_(rows, weight[number].t())


def grouped_outer(left: torch.Tensor, right: torch.Tensor, groups: Groups, count: int) -> torch.Tensor:
    """`left_g.T @ right_g` over the rows of each group g; zero for a group without rows.

    Args:
        left: `[rows, m]`.
        right: `[rows, n]`.
        groups: rows of each group.
        count: number of matrices wanted: that of the groups, or 1 for one sum over all rows.

    Returns:
        `[count, m, n]`.
    """
    if count == 1:
        return (left.t() @ right).unsqueeze(0)
    if use_grouped_mm(groups, left, right, in_place=False):
        return F.grouped_mm(left.t(), right, offs=groups.ends)
    result = left.new_zeros(count, left.shape[1], right.shape[1])
    for number, (one, other) in groups.slices(left, right):
        torch.mm(one.t(), other, out=result[number])
    return result
