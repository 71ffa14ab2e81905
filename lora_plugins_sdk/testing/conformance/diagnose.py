"""From a wrong tensor to the most likely cause: each known fault leaves a pattern, and patterns can be tested.

A hypothesis is accepted when it explains the tensor to within `FIT`, far below the error that asked for a cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIT = 1e-3
NO_PATTERN = "no known pattern: compare the site's own mathematics (input treatment, scale, rank) with the reference"


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """What a wrong tensor could be instead of what was expected.

    Args:
        peers: the same tensor as the ranks of one group hold it.
        group: name of that group.
        ratios: a factor by which it may be off -> what that means.
        others: name -> expected value of other tensors.
        fallback: what to say when no hypothesis fits.
    """

    peers: Sequence[Tensor] = ()
    group: str = "tp"
    ratios: Mapping[float, str] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    fallback: str | None = None


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry of `expected`; infinite for NaN or another shape."""
    if actual.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


def likely_cause(actual: Tensor, expected: Tensor, suspects: Suspects | None = None) -> str:
    """The first hypothesis that explains `actual`, in words.

    Args:
        actual: wrong.
        expected: right.
        suspects: what else is known.
    """
    suspects = suspects or Suspects()
    if actual.shape != expected.shape:
        turned = actual.shape == expected.mT.shape if expected.dim() > 1 else False
        shapes = f"shape {list(actual.shape)} instead of {list(expected.shape)}"
        return f"{shapes}: transposed" if turned else f"{shapes}: of another layout"
    if not torch.isfinite(actual).all():
        return "holds NaN or infinite values: uninitialised memory, or a scale that overflows"
    actual, expected = actual.double(), expected.double()
    for hypothesis in (_zero, _sum_over_peers, _ratio, _other, _transposed, _rows, _columns, _partly):
        words = hypothesis(actual, expected, suspects)
        if words:
            return words
    return NO_PATTERN if suspects.fallback is None else suspects.fallback


def _fits(actual: Tensor, guess: Tensor) -> bool:
    return relative_error(actual, guess) < FIT


def _zero(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    return "is zero: it was never reached (skipped, detached, or masked)" if not actual.any() else None


def _sum_over_peers(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    if len(suspects.peers) < 2 or _fits(actual, expected / len(suspects.peers)):
        return None
    group, ranks = suspects.group.upper(), len(suspects.peers)
    parts: list[Tensor] = []
    for peer in (peer.double() for peer in suspects.peers):
        if not any(_fits(peer, part) for part in parts):
            parts.append(peer)
    if len(parts) < 2 or not _fits(torch.stack(parts).sum(0), expected):
        return None
    if len(parts) < ranks:
        return (
            f"the sum of the {len(parts)} parts that the {ranks} {group} ranks hold is right: summed over some of "
            f"these ranks only (another tag than `{suspects.group}`)"
        )
    return (
        f"the sum over the {ranks} {group} ranks is right and each rank holds a part: a gradient sum or a collective "
        f"over {group} is missing (tag `{suspects.group}` dropped, or a region left out)"
    )


def _ratio(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    square = (expected * expected).sum()
    if not square:
        return None
    ratio = ((actual * expected).sum() / square).item()
    if not ratio or not _fits(actual, expected * ratio):
        return None
    for known, meaning in suspects.ratios.items():
        if math.isclose(ratio, known, rel_tol=FIT):
            return f"off by the factor {ratio:.4g}: {meaning}"
    return f"off by the constant factor {ratio:.4g}: right direction, wrong scale"


def _other(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    for name, other in suspects.others.items():
        if other.shape == actual.shape and other is not expected and _fits(actual, other.double()):
            return f"holds the value of {name}: names or layers are mixed up"
    return None


def _transposed(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    square = actual.dim() == 2 and actual.shape[0] == actual.shape[1]
    return "transposed" if square and _fits(actual, expected.t()) else None


def _rows(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    return _permutation(actual, expected, "rows")


def _columns(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    if actual.dim() != 2:
        return None
    return _permutation(actual.t(), expected.t(), "columns")


def _permutation(actual: Tensor, expected: Tensor, unit: str) -> str | None:
    """Whether the rows are the expected ones in another order, and in which."""
    if actual.dim() < 2 or len(expected) < 2:
        return None
    rows, wanted = actual.reshape(len(actual), -1), expected.reshape(len(expected), -1)
    order = torch.cdist(rows, wanted).argmin(dim=1)
    if not _fits(rows, wanted[order]) or len(order.unique()) != len(order):
        return None
    found = order.tolist()
    size = len(found)
    shift = found[0]
    if found == [(index + shift) % size for index in range(size)]:
        half = shift * 2 == size
        return f"the two halves of its {unit} are swapped" if half else f"its {unit} are rotated by {shift}"
    for blocks in (block for block in range(2, size) if size % block == 0):
        turned = torch.arange(size).view(blocks, -1).t().reshape(-1).tolist()
        if found == turned:
            return f"its {unit} are interleaved in {blocks} blocks instead of concatenated, or the reverse"
    first = next(index for index in range(size) if found[index] != index)
    return (
        f"its {unit} are permuted: {unit[:-1]} {first} holds {unit[:-1]} {found[first]} (a wrong pack or shard order)"
    )


def _partly(actual: Tensor, expected: Tensor, suspects: Suspects) -> str | None:
    """Whether only some rows are wrong."""
    if actual.dim() != 2:
        return None
    bad = (actual - expected).abs().amax(dim=1) > FIT * expected.abs().max()
    rows = bad.nonzero().flatten().tolist()
    if not rows or len(rows) == len(bad):
        return None
    zero = " and zero" if not actual[bad].any() else ""
    return f"only rows {rows[0]} to {rows[-1]} are wrong{zero} ({len(rows)} of {len(bad)}): one block or shard of it"
