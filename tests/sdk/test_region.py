"""Where a branch communicates, and which gradient sums follow."""

import pytest

from lora_plugins_sdk import RunFacts, SiteKind
from lora_plugins_sdk.region import Collective, region_of

TP = RunFacts(tp=2)
SP = RunFacts(tp=2, sequence_parallel=True)
NONE, REDUCE = Collective.NONE, Collective.ALL_REDUCE
GATHER, SCATTER = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
SHARDED, REPLICATED = 0, -1


@pytest.mark.parametrize(
    ("kind", "facts", "forward", "backward", "replicated_sum"),
    [
        # The r-wide gradient is completed in the backward, so a replicated A needs no sum and dX is complete.
        (SiteKind.COLUMN, TP, NONE, REDUCE, None),
        (SiteKind.COLUMN, SP, GATHER, SCATTER, "tp"),
        (SiteKind.ROW, TP, REDUCE, NONE, None),
        (SiteKind.ROW, SP, SCATTER, GATHER, "tp"),
        (SiteKind.REPLICATED, TP, NONE, NONE, None),
        (SiteKind.REPLICATED, SP, NONE, NONE, "tp"),
    ],
)
def test_rule(
    kind: SiteKind, facts: RunFacts, forward: Collective, backward: Collective, replicated_sum: str | None
) -> None:
    """B1: under SP a replicated factor's gradient is summed over TP."""
    region = region_of(kind, facts)
    assert (region.forward, region.backward) == (forward, backward)
    assert region.sum_group(REPLICATED) == replicated_sum
    assert region.sum_group(SHARDED) is None


@pytest.mark.parametrize("kind", SiteKind)
@pytest.mark.parametrize("facts", [RunFacts(), RunFacts(dp=4), RunFacts(pp=2, dp=2)], ids=str)
def test_without_tensor_parallelism_nothing_is_communicated(kind: SiteKind, facts: RunFacts) -> None:
    region = region_of(kind, facts)
    assert region.forward is region.backward is NONE
    assert region.sum_group(REPLICATED) is None


@pytest.mark.parametrize("facts", [TP, SP], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", SiteKind)
def test_backward_is_the_transpose_of_forward_where_tokens_move(kind: SiteKind, facts: RunFacts) -> None:
    region = region_of(kind, facts)
    transposed = {GATHER: SCATTER, SCATTER: GATHER}
    if region.forward in transposed:
        assert region.backward is transposed[region.forward]
