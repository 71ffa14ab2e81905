"""The parameter table: consistent in every layout, and what it was when the author last looked."""

from __future__ import annotations

from collections.abc import Iterator

from lora_plugins_sdk.cli.render import markdown_table
from lora_plugins_sdk.cli.table_rows import COLUMNS, table_rows
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParameterTable, ParamRow
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.layouts import layouts_of, needed_capabilities
from lora_plugins_sdk.testing.layout import Layout

_SNAPSHOT_LAYOUTS = (Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True))
_EXPERT_SNAPSHOT_LAYOUTS = (Layout(), Layout(tp=2, dp=2, ep=2, sequence_parallel=True))


def _tables(context: Context) -> Iterator[Finding]:
    lacks = dict(context.subject.lacks)
    single = {row.init_key: row for row in context.subject.table(RunFacts()).rows}
    for layout in (Layout(), *layouts_of(context.subject.selected.architecture)):
        if any(name in lacks for name in needed_capabilities(layout)):
            continue
        try:
            table = context.subject.table(layout)
        except LoraError as error:
            yield Finding(what=f"table of {layout}", cause=f"cannot be derived: {error}")
            continue
        context.exercised(row.host_module for row in table.rows)
        for row in table.rows:
            for problem in _row_problems(row, single, layout):
                yield factor_finding(f"table of {layout}", row, cause=problem)
        yield from _storage_problems(table, layout)


def _row_problems(row: ParamRow, single: dict[str, ParamRow], facts: RunFacts) -> Iterator[str]:
    alone = single.get(row.init_key)
    if alone is None or (alone.full_shape, alone.hf_name) != (row.full_shape, row.hf_name):
        yield "has not the name and full shape that one process gives it: the adapter would depend on the layout"
    for dim, (full, local) in enumerate(zip(row.full_shape, row.local_shape, strict=True)):
        split = {row.partition_dim: facts.etp if row.expert else facts.tp, row.expert_dim: facts.ep}.get(dim, 1)
        missing = full - local * split
        if missing > 0 or missing <= -split or (missing and dim != row.partition_dim):
            yield f"holds {local} of {full} along dimension {dim} over {split} ranks"
    if row.partition_dim >= 0 and row.grad_sum_group in ("tp", "etp", "etp_ep"):
        yield "is split over TP and summed over TP: each rank holds the gradient of other entries"
    if row.expert_dim >= 0 and row.grad_sum_group == "etp_ep":
        yield "is split over EP and summed over EP: each rank holds the gradient of other experts"


def _storage_problems(table: ParameterTable, layout: Layout) -> Iterator[Finding]:
    """Factors that share a parameter: they follow each other and agree on everything but their name."""
    for plan in table.plans:
        ends: dict[str, int] = {}
        for row in plan.rows:
            first = next(one for one in plan.rows if one.param == row.param)
            if row.stacked_at != ends.get(row.param, 0):
                cause = f"starts at row {row.stacked_at} of {row.param}, where {ends.get(row.param, 0)} rows precede it"
                yield factor_finding(f"table of {layout}", row, cause=cause)
            shared = ("grad_sum_group", "partition_dim", "expert_dim", "expert", "dtype")
            unlike = [name for name in shared if getattr(row, name) != getattr(first, name)]
            if unlike:
                cause = f"differs in {', '.join(unlike)} from {first.hf_module}, with which it shares a parameter"
                yield factor_finding(f"table of {layout}", row, cause=cause)
            ends[row.param] = row.stacked_at + row.local_shape[-2]


def snapshot_text(context: Context) -> str:
    """The tables of some layouts for reading, equal layers folded."""
    lacks = dict(context.subject.lacks)
    parts = [f"# Parameter table of {context.subject.architecture}\n"]
    layouts = _SNAPSHOT_LAYOUTS
    if any(site.experts for site in context.subject.selected.architecture.sites):
        layouts = _EXPERT_SNAPSHOT_LAYOUTS
    for layout in layouts:
        if not any(name in lacks for name in needed_capabilities(layout)):
            table = markdown_table(COLUMNS, table_rows(context.subject.table(layout)))
            parts.append(f"## {layout}\n\n{table}\n")
    return "\n".join(parts)


def _snapshot(context: Context) -> Iterator[Finding]:
    path = context.snapshot
    assert path is not None, "the check is not run without a file"
    text = snapshot_text(context)
    if context.update_snapshot:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if not path.is_file():
        yield Finding(what="table snapshot", cause=f"{path} does not exist: write it with {context.how_to_update}")
        return
    context.exercised(row.host_module for row in context.subject.table(RunFacts()).rows)
    old, new = path.read_text().splitlines(), text.splitlines()
    gone = [line for line in old if line not in new]
    come = [line for line in new if line not in old]
    if old != new:
        shown = "\n".join([*(f"- {line}" for line in gone), *(f"+ {line}" for line in come)])
        cause = f"the table is not what {path} says; if that is meant, use {context.how_to_update}\n{shown}"
        yield Finding(what="table snapshot", cause=cause)


CHECKS = (
    Check(
        name="tables",
        level=Level.STATIC,
        proves="The parameter table resolves in every layout, and names and full shapes do not depend on it.",
        run=_tables,
    ),
    Check(
        name="snapshot",
        level=Level.STATIC,
        proves="The parameter table is the one that the author last accepted.",
        run=_snapshot,
        unavailable=lambda context: None if context.snapshot is not None else "no snapshot file was named",
    ),
)
