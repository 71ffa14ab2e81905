"""Statistics over tokens that aggregate exactly over microbatches, updates and ranks: sums and counts, never
means of means."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStats:
    """Sums over tokens.

    Args:
        tokens: number of tokens summed over, a 0-d fp64 tensor.
        sums: per statistic the sum over these tokens, 0-d fp64.
        maxima: per statistic the largest value over these tokens, 0-d fp64; -inf over no token.
    """

    tokens: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def over(cls, mask: Tensor, means: dict[str, Tensor], maxima: dict[str, Tensor] | None = None) -> TokenStats:
        """Statistics of per-token tensors, all of the shape of the boolean `mask`."""

        def largest(values: Tensor) -> Tensor:
            kept = values.detach()[mask].double()
            return (
                kept.max() if kept.numel() else torch.full((), float("-inf"), dtype=torch.float64, device=mask.device)
            )

        return cls(
            tokens=mask.sum().double(),
            sums={name: values.detach()[mask].double().sum() for name, values in means.items()},
            maxima={name: largest(values) for name, values in (maxima or {}).items()},
        )

    def __add__(self, other: TokenStats) -> TokenStats:
        """Statistics over both sets of tokens. Both must hold the same names."""
        assert self.sums.keys() == other.sums.keys() and self.maxima.keys() == other.maxima.keys()
        return TokenStats(
            tokens=self.tokens + other.tokens,
            sums={name: self.sums[name] + other.sums[name] for name in self.sums},
            maxima={name: torch.maximum(self.maxima[name], other.maxima[name]) for name in self.maxima},
        )

    def all_reduce(self, group: dist.ProcessGroup | None) -> TokenStats:
        """Statistics over the tokens of all ranks of `group`; unchanged when it is None. Collective."""
        if group is None:
            return self
        sums = torch.stack([self.tokens, *self.sums.values()])
        dist.all_reduce(sums, group=group)
        maxima = dict(self.maxima)
        if maxima:
            stacked = torch.stack(list(maxima.values()))
            dist.all_reduce(stacked, op=dist.ReduceOp.MAX, group=group)
            maxima = dict(zip(maxima, stacked.unbind(), strict=True))
        return TokenStats(tokens=sums[0], sums=dict(zip(self.sums, sums[1:].unbind(), strict=True)), maxima=maxima)

    def values(self) -> dict[str, float]:
        """Means by the name of their sum, and maxima by theirs. Over no token every one is 0."""
        count = self.tokens.item()
        means = {name: (total.item() / count if count else 0.0) for name, total in self.sums.items()}
        return means | {name: (value.item() if count else 0.0) for name, value in self.maxima.items()}
