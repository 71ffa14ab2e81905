"""Every mutant."""

from __future__ import annotations

from mutants import experts, exports, hybrid, initial, names, packs, pins, reductions, regions, scales, state, tags
from mutants.mutant import Mutant, mutants_of

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for family in (tags, reductions, regions, packs, pins, scales, initial, names, exports, state, hybrid, experts)
    for mutant in mutants_of(family)
)
