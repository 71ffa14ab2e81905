"""Fields of a Qwen3.5/3.6 MoE config that are not sizes, and what a run of it cannot have. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk import Diagnostic, RunFacts
from lora_plugins_sdk.hosts.rope import rope_fields

_ROTARY_SHARE = 0.25  # transformers' own default


def rotary_percent(text: Mapping[str, Any]) -> float:
    """Share of each head that is rotated."""
    return rope_fields({"partial_rotary_factor": _ROTARY_SHARE, **text})["partial_rotary_factor"]


def rope_problems(text: Mapping[str, Any], head_dim: int) -> list[Diagnostic]:
    """A rotated share that is no even number of a head's elements, which are rotated in pairs."""
    share = rotary_percent(text)
    rotated = int(head_dim * share)
    if 0 < share <= 1 and rotated and rotated % 2 == 0:
        return []
    return [
        Diagnostic(
            subject=f"partial_rotary_factor = {share}",
            reason=f"rotates {rotated} of a head's {head_dim} elements, and they are rotated in pairs",
            cure="use the checkpoint's own config.json",
        )
    ]


def run_problems(facts: RunFacts) -> list[Diagnostic]:
    """Parallel runs that this model cannot have, whatever its sizes."""
    if facts.cp == 1:
        return []
    return [
        Diagnostic(
            subject=f"context parallel size {facts.cp}",
            reason="a gated delta net carries a state along the whole sequence, and megatron-core does not hand it "
            "from rank to rank",
            cure="use context parallel size 1; split the sequence with sequence parallelism instead",
        )
    ]
