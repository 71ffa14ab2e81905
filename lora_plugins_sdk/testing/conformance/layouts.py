"""The parallel layouts of level 2, and the capabilities that each needs."""

from __future__ import annotations

from lora_plugins_sdk.architecture import Architecture
from lora_plugins_sdk.testing.layout import Layout

LAYOUTS: tuple[Layout, ...] = (
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(tp=2, dp=2),
    Layout(tp=2, cp=2, sequence_parallel=True),
)
"""Of a model without routed experts."""

# With experts, TP goes with sequence parallelism: otherwise every TP rank would dispatch the same tokens.
EXPERT_LAYOUTS: tuple[Layout, ...] = (
    Layout(dp=2, ep=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, etp=1, sequence_parallel=True),
    Layout(tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
)
"""Of a model with routed experts."""


def layouts_of(architecture: Architecture) -> tuple[Layout, ...]:
    """The layouts that an architecture is checked in."""
    return EXPERT_LAYOUTS if any(site.experts for site in architecture.sites) else LAYOUTS


def needed_capabilities(layout: Layout) -> tuple[str, ...]:
    """Capabilities without which a plugin cannot run in this layout."""
    uses = {
        "tensor-parallel": layout.tp > 1,
        "sequence-parallel": layout.sequence_parallel,
        "pipeline-parallel": layout.pp > 1,
        "data-parallel": layout.dp > 1,
        "context-parallel": layout.cp > 1,
        "expert-parallel": layout.experts_apart,
    }
    return tuple(name for name, used in uses.items() if used)
