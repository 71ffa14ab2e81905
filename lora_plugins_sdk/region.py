"""Where a branch communicates, and which gradient sums follow from it.

The branch multiplies by A before it talks to other ranks, so what travels is r wide: `A` commutes with gathering tokens
and with summing partial products (both are linear). From the place of that communication follows which factor's
gradient is complete on each rank; forward and gradient tag are therefore read off the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import SiteKind

GRAD_SUM_GROUPS = ("tp", "etp", "etp_ep")
"""Groups that a factor's gradient may be summed over, besides the host's own data-parallel reduction."""


class Collective(StrEnum):
    """A collective over the TP group on the r-wide product `[tokens, r]`."""

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """The communication of one branch.

    Args:
        forward: applied to `s = x A^T`.
        backward: applied to the gradient of `s` before it meets `x` and `A`; the transpose of `forward`, or the sum
            over ranks that each see only their share of the output.
        tokens_split: each rank holds different tokens wherever a replicated factor's gradient is formed.
    """

    forward: Collective
    backward: Collective
    tokens_split: bool

    def sum_group(self, partition_dim: int) -> str | None:
        """Group over which the gradient of a factor must be summed: `"tp"`, or None when every rank has it complete.

        A sharded factor is complete by construction. A replicated one (`partition_dim == -1`) is complete unless ranks
        saw different tokens: without sequence parallelism `backward` has already completed the gradient of `s`.
        """
        return "tp" if partition_dim == -1 and self.tokens_split else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRegion:
    """Where a branch within routed experts communicates: nowhere.

    The dispatcher stands around it. It brings each expert all its tokens from the ranks of one ETP x EP group, the same
    ones to every ETP rank, and its return sums what ETP ranks give. So every ETP rank works out, of whatever it holds
    in full, the share that belongs to its own part of the weight.

    Args:
        etp: expert tensor parallel size.
        ep: expert parallel size.
    """

    etp: int
    ep: int

    def sum_group(self, partition_dim: int, shared: bool) -> str | None:
        """Group over which the gradient of a factor must be summed: `"etp"`, `"etp_ep"`, or None when complete.

        Args:
            partition_dim: dimension that ETP splits, -1 for none.
            shared: whether all experts have this factor in common; ranks that hold other experts then hold shares too.
        """
        if shared:
            return "etp_ep" if self.etp * self.ep > 1 else None
        return "etp" if partition_dim == -1 and self.etp > 1 else None


def region_of(kind: SiteKind, facts: RunFacts) -> Region:
    """The region of a site of this kind in a run with these sizes."""
    none = Collective.NONE
    split = facts.sequence_parallel
    if facts.tp == 1 or kind is SiteKind.REPLICATED:
        return Region(forward=none, backward=none, tokens_split=split)
    if kind is SiteKind.COLUMN:
        if split:
            return Region(forward=Collective.ALL_GATHER, backward=Collective.REDUCE_SCATTER, tokens_split=True)
        return Region(forward=none, backward=Collective.ALL_REDUCE, tokens_split=False)
    if split:
        return Region(forward=Collective.REDUCE_SCATTER, backward=Collective.ALL_GATHER, tokens_split=True)
    return Region(forward=Collective.ALL_REDUCE, backward=none, tokens_split=False)
