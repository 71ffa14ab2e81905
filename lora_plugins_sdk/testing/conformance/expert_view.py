"""Sums over each expert's tokens, put together from the ranks that hold parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.table import SitePlan
from lora_plugins_sdk.testing.conformance.local_view import by_projection
from lora_plugins_sdk.testing.conformance.observe.observation import RankObservation

# Whether ETP ranks hold different columns of a quantity, shares of its sum, or the whole each.
_COLUMNS, _SHARES, _WHOLE = "columns", "shares", "whole"
_HELD = {
    ("outputs", SiteKind.COLUMN): _COLUMNS,
    ("output_grads", SiteKind.COLUMN): _COLUMNS,
    ("input_grads", SiteKind.COLUMN): _SHARES,
    ("outputs", SiteKind.ROW): _SHARES,
    ("output_grads", SiteKind.ROW): _WHOLE,
    ("input_grads", SiteKind.ROW): _COLUMNS,
}


def sum_of_microbatches(captured: Sequence[Tensor]) -> Tensor:
    """What a rank captured of a grouped linear, `[local experts, width]`, over all its tokens."""
    return torch.stack(list(captured)).sum(0)


def all_experts(plan: SitePlan, facts: RunFacts, ranks: Iterable[RankObservation], quantity: str) -> dict[str, Tensor]:
    """A quantity of all experts and all tokens, `[experts, width]`; per HF module, or under the host's path for the
    input's gradient.

    Args:
        plan: a site with experts.
        facts: of the run.
        ranks: those that called the linear.
        quantity: a field of `Captured`.
    """
    held = _HELD[quantity, plan.site.kind]
    parts: dict[tuple[int, int], Tensor] = {}
    for seen in ranks:
        if held == _WHOLE and seen.etp_rank > 0:
            continue
        key = (seen.ep_rank, seen.etp_rank if held == _COLUMNS else 0)
        value = sum_of_microbatches(getattr(seen.captured, quantity)[plan.host_module])
        parts[key] = parts[key] + value if key in parts else value
    shards = [
        torch.cat([parts[ep, etp] for ep in range(facts.ep)]) for etp in range(facts.etp if held == _COLUMNS else 1)
    ]
    if quantity == "input_grads":
        return {plan.host_module: torch.cat(shards, dim=1)}
    as_dense = RunFacts(tp=len(shards))
    named = [by_projection(plan, as_dense, etp, shard) for etp, shard in enumerate(shards)]
    return {name: torch.cat([one[name] for one in named], dim=1) for name in named[0]}
