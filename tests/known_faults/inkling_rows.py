"""Hazards that were read in a peer's published code for Inkling, I1 to I5, where no user has met them in public yet."""

from __future__ import annotations

from known_faults.row import Row

_INKLING = "plugins/inkling/tests"

INKLING = {
    "I1": Row(
        cure="`tensor_model_parallel` follows the table, so that the gradient norm counts every rank's shard of a B",
        mutants=("shard-of-relative-states-not-counted",),
    ),
    "I2": Row(
        cure="`initial_factor` slices the full factor for its rank; no random state of the process takes part",
        mutants=("row-shards-drawn-alike",),
    ),
    "I3": Row(
        cure="the region of a column-parallel branch completes dX; runs without sequence parallelism are refused here",
        tests=(f"{_INKLING}/test_inkling_build.py::test_runs_that_are_refused",),
        mutants=("column-branch-keeps-its-share-of-the-gradient", "copy-region-missing"),
    ),
    "I4": Row(
        cure="tag and mark of an expert's factor follow from its kind and from ETP x EP, not from EP > 1",
        mutants=("experts-untagged-and-unmarked-without-ep",),
    ),
    "I5": Row(
        cure="an export has a row for each token and no other, whatever TP pads; an import pads again on the last rank",
        tests=(f"{_INKLING}/test_inkling_adapter.py::test_the_adapter_is_the_merged_checkpoint",),
        mutants=("padding-of-the-vocabulary-exported", "last-rank-padded-at-the-front"),
    ),
}
