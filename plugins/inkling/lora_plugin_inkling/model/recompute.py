"""Selective activation recompute: which parts of a layer are computed again in the backward pass."""

from __future__ import annotations

from typing import Any


def recomputes(config: Any, part: str) -> bool:
    """Whether megatron-core's config asks to recompute this part (one of `fields.RECOMPUTED`)."""
    return config.recompute_granularity == "selective" and part in config.recompute_modules
