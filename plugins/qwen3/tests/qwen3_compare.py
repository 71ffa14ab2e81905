"""Put what the ranks saw together again, in the plainest way, and compare it with one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from qwen3_tiny import VOCABULARY
from qwen3_trainer import Factor, Report
from torch import Tensor

from lora_plugins_sdk.testing import Layout


def at(reports: Sequence[Report], place: tuple[int, int, int]) -> Report:
    return next(one for one in reports if one.place == place)


def logits(reports: Sequence[Report], layout: Layout) -> list[Tensor]:
    """Full logits per microbatch in the order of one process."""
    dealt = []
    for dp in range(layout.dp):
        shards = [at(reports, (tp, layout.pp - 1, dp)).logits for tp in range(layout.tp)]
        dealt.append([torch.cat(parts, dim=-1)[..., :VOCABULARY] for parts in zip(*shards, strict=True)])
    return _undeal(dealt)


def dx(reports: Sequence[Report], layout: Layout) -> list[Tensor]:
    """Full gradient of the embedding's output per microbatch; TP ranks must agree where each holds all of it."""
    dealt = []
    for dp in range(layout.dp):
        parts = zip(*[at(reports, (tp, 0, dp)).dx for tp in range(layout.tp)], strict=True)
        if layout.sequence_parallel:
            dealt.append([torch.cat(shards, dim=0) for shards in parts])
        else:
            dealt.append([_same(shards, "dX") for shards in parts])
    return _undeal(dealt)


def factors(reports: Sequence[Report], layout: Layout, kind: str, step: int = 0) -> dict[Factor, Tensor]:
    """Full factors (`weights` after a step) or their gradients (`grads`).

    Replicas over DP, and over TP where a factor is not split, must be bit-identical.
    """
    full: dict[Factor, Tensor] = {}
    for pp in range(layout.pp):
        for factor, split in at(reports, (0, pp, 0)).split.items():
            shards = []
            for tp in range(layout.tp):
                ranks = [at(reports, (tp, pp, dp)) for dp in range(layout.dp)]
                assert all(one.split[factor] == split for one in ranks)
                values = [(one.grads if kind == "grads" else one.weights[step])[factor] for one in ranks]
                shards.append(_same(values, f"{factor} over DP"))
            assert factor not in full, f"{factor} is on two stages"
            full[factor] = _same(shards, f"{factor} over TP") if split == -1 else torch.cat(shards, dim=split)
    return full


def largest_difference(mine: dict[Factor, Tensor], expected: dict[Factor, Tensor]) -> float:
    """Largest absolute difference over all factors; rows and columns past HF's are padding and not compared."""
    assert mine.keys() == expected.keys()
    return max(
        (mine[factor][: other.shape[0], : other.shape[1]] - other).abs().max().item()
        if factor in mine
        else float("inf")
        for factor, other in expected.items()
    )


def largest(parts: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest absolute difference over all microbatches."""
    return max((one - other).abs().max().item() for one, other in zip(parts, expected, strict=True))


def _undeal(dealt: list[list[Tensor]]) -> list[Tensor]:
    """Microbatch i went to DP rank i modulo the DP size."""
    return [one for group in zip(*dealt, strict=True) for one in group]


def _same(values: Sequence[Tensor], what: str) -> Tensor:
    for other in values[1:]:
        assert torch.equal(values[0], other), f"{what}: replicas differ by {(values[0] - other).abs().max().item():.3g}"
    return values[0]
