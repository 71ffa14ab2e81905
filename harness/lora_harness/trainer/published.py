"""Whether the adapter has moved since its last published version: one number, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class PublishedFactors:
    """This rank's factors as they were when the engine last received them.

    Changes add up: many small steps that were not published are seen together.

    Args:
        parameters: this rank's trained parameters; may be empty on a stage without adapted modules.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._published: list[Tensor] | None = None

    def remember(self) -> None:
        """The engine has the factors as they are now."""
        self._published = [one.detach().clone() for one in self._parameters]

    def forget(self) -> None:
        """What the engine has counts no longer: the next comparison finds a change."""
        self._published = None

    def largest_change(self) -> float:
        """max |factor - published factor| over all ranks; infinite when nothing was published or a factor is NaN.

        Collective: one all-reduce of one number over all ranks.
        """
        change = math.inf
        if self._published is not None:
            pairs = zip(self._parameters, self._published, strict=True)
            changes = [float((now.detach() - then).abs().max()) for now, then in pairs if now.numel()]
            # A maximum may lose NaN on its way between ranks; infinity always wins.
            change = math.inf if any(map(math.isnan, changes)) else max(changes, default=0.0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shared = torch.tensor(change, dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared)
