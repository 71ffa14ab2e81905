"""Wrong marks on a factor: which sums its gradient gets, and how often it counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lora_plugins_sdk import ParamRow, RunFacts
from lora_plugins_sdk.testing.conformance import Level
from mutants.mutant import seeded
from mutants.places import FC1, FC2, PROJ, QKV, TP2, TP2_SP
from mutants.seams import marked, rows_changed


def _tag(module: str, factor: str, group: str | None) -> Any:
    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        hit = (row.host_module, row.factor) == (module, factor) and facts.tp > 1
        return replace(row, grad_sum_group=group) if hit else row

    return rows_changed(change)


@seeded("gradients", TP2_SP, imitates="B1", site=QKV, factor="A", words="tag `tp` dropped")
def tag_dropped_from_column_a() -> Iterator[None]:
    """Under SP the stacked A of a column-parallel linear is not summed over TP."""
    with _tag(QKV, "A", None):
        yield


@seeded("snapshot", level=Level.STATIC, words="+ | 1 | B |")
@seeded("gradients", TP2_SP, imitates="B1", site=PROJ, factor="B", words="tag `tp` dropped")
def tag_dropped_from_row_b() -> Iterator[None]:
    """Under SP the B of a row-parallel linear is not summed over TP."""
    with _tag(PROJ, "B", None):
        yield


@seeded("gradients", TP2, imitates="B8", site=FC1, factor="A", words="a wrong tag")
def tag_on_complete_a() -> Iterator[None]:
    """Without SP the A of a column-parallel linear, complete on every rank, is summed over TP all the same."""
    with _tag(FC1, "A", "tp"):
        yield


@seeded("gradients", TP2, imitates="B8", site=FC2, factor="B", words="a wrong tag")
def tag_on_complete_b() -> Iterator[None]:
    """Without SP the B of a row-parallel linear, complete on every rank, is summed over TP all the same."""
    with _tag(FC2, "B", "tp"):
        yield


@seeded("tables", level=Level.STATIC, imitates="B2", site=FC1, factor="B", words="split over TP and summed over TP")
def tag_on_the_wrong_factor() -> Iterator[None]:
    """The B of a column-parallel linear, which TP splits, is summed over TP."""
    with _tag(FC1, "B", "tp"):
        yield


@seeded("gradients", TP2_SP, imitates="B8", site=FC1, factor="A", words="summed over the 2 TP ranks")
def host_sums_again() -> Iterator[None]:
    """A factor is marked `sequence_parallel`, so that megatron-core sums its gradient before the adapter does."""
    with marked(FC1, "A", sequence_parallel=True):
        yield


@seeded("grad-norm", TP2, imitates="B13", site=FC1, factor="A", words="more than once")
def replica_counted_twice() -> Iterator[None]:
    """A replicated factor is marked `tensor_model_parallel`, so the gradient norm counts it on every rank."""
    with marked(FC1, "A", tensor_model_parallel=True):
        yield


@seeded("grad-norm", TP2, imitates="B12", site=FC1, factor="B", words="not counted")
def shard_not_counted() -> Iterator[None]:
    """A factor that TP splits is not marked, so the gradient norm counts rank 0's shard alone."""
    with marked(FC1, "B_up_proj", tensor_model_parallel=False):
        yield
