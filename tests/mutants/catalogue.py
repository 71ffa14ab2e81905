"""Every mutant."""

from __future__ import annotations

from mutants import (
    embedding,
    experts,
    exports,
    hybrid,
    initial,
    inkling,
    names,
    packs,
    pins,
    qwen3_moe,
    reductions,
    regions,
    scales,
    state,
    tags,
)
from mutants.mutant import Mutant, mutants_of

_FAMILIES = (
    embedding,
    tags,
    reductions,
    regions,
    packs,
    pins,
    scales,
    initial,
    names,
    exports,
    state,
    hybrid,
    experts,
    inkling,
    qwen3_moe,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for family in _FAMILIES for mutant in mutants_of(family))
