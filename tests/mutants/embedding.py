"""Mistakes that only an embedding's adapter can have: ids of other ranks, the sum over them, the order of tokens, the
factor that begins at zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from lora_plugins_sdk import ParamRow, embedding_branch
from lora_plugins_sdk.embedding_branch import LookupGeometry
from lora_plugins_sdk.init import initial_factor
from lora_plugins_sdk.region import Collective
from lora_plugins_sdk.shards import Place
from mutants.mutant import seeded
from mutants.places import EMBEDDING, TP2, TP2_SP
from mutants.seams import initial_values_changed, region_changed, tagged


@seeded("outputs", TP2, imitates="ids of other ranks read as the first of this one's", site=EMBEDDING)
def mask_forgotten() -> Iterator[None]:
    """Ids of other ranks' vocabulary select this rank's first column in place of zero."""

    def unmasked(self: LookupGeometry, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = (ids >= self.first) & (ids < self.first + self.count)
        return (ids - self.first).where(mine, 0), torch.ones_like(mine).unsqueeze(1)

    with patch.object(LookupGeometry, "local", unmasked):
        yield


@seeded("outputs", TP2, imitates="B8", site=EMBEDDING, words="region")
def sum_forgotten() -> Iterator[None]:
    """The r-wide rows are not summed over TP: each rank adds what its own vocabulary gives."""
    with region_changed(EMBEDDING, forward=Collective.NONE):
        yield


@seeded("gradients", TP2_SP, imitates="B1", site=EMBEDDING, factor="B")
def gradient_of_b_not_summed() -> Iterator[None]:
    """Under SP each rank forms B's gradient from its own tokens."""
    with tagged(EMBEDDING, "B", None):
        yield


@seeded("outputs", TP2_SP, imitates="samples before tokens", site=EMBEDDING)
def ids_not_turned() -> Iterator[None]:
    """Under SP ids are read sample by sample where the output lies token by token."""
    right = embedding_branch.embedding_delta

    def changed(plan: Any, run: Any) -> Any:
        delta = right(plan, run)
        if not run.facts.sequence_parallel:
            return delta
        return lambda output, ids, factors: delta(output, ids.reshape(-1).view(ids.shape[::-1]).t(), factors)

    with patch.object(embedding_branch, "embedding_delta", changed):
        yield


@seeded(
    "initial", imitates="tokens that no batch had changed all the same", site=EMBEDDING, factor="A", words="not zero"
)
def begins_as_a_linear() -> Iterator[None]:
    """A is drawn and B is zero, so that the first step of B changes every token's embedding."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(replace(row, embedding=False), seed, place)

    with initial_values_changed(value):
        yield
