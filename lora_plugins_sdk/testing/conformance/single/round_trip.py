"""Out and in again: exports are what was imported, bit for bit, and belong to nobody else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_export import export_adapter
from lora_plugins_sdk.peft_files import PeftAdapter, read_adapter, write_adapter
from lora_plugins_sdk.peft_import import import_adapter
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParameterTable
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.diagnose import Suspects, likely_cause, relative_error
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.observation import local_factors
from lora_plugins_sdk.testing.conformance.observe.session import start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout


@dataclass(frozen=True, kw_only=True)
class _Trip:
    """Factors after import, their export, the factors after export -> file -> import; then what must not happen.

    `refused` is why that export could not be imported, `replaced` the factors that an import put into new parameters.
    """

    imported: dict[str, Tensor]
    exported: dict[str, Tensor]
    returned: dict[str, Tensor]
    refused: str
    replaced: list[str]
    aliased: list[str]
    accepted: list[str]
    written: list[str]


def _trip(subject: Subject, directory: Path, problem: Problem) -> _Trip:
    session = start_session(subject, directory, problem.factors)
    model, adapter = session.model, session.adapter
    held = _parameters(adapter)
    import_adapter(model, peft_adapter(subject, problem.factors))
    replaced = [key for key, parameter in _parameters(adapter).items() if parameter is not held[key]]
    imported, saved = local_factors(adapter), export_adapter(model)
    exported = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.fill_(7.0)
    aliased = [name for name, tensor in saved.tensors.items() if not torch.equal(tensor, exported[name])]
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(PeftAdapter(tensors=exported, config=saved.config), folder)
        try:
            import_adapter(model, read_adapter(folder))
            refused = ""
        except LoraError as error:
            refused = str(error)
    returned, accepted, written = local_factors(adapter), [], []
    for name in exported if not refused else ():
        rest = {other: tensor + 1 for other, tensor in exported.items() if other != name}
        try:
            import_adapter(model, PeftAdapter(tensors=rest, config=saved.config))
            accepted.append(name)
        except LoraError:
            now = local_factors(adapter)
            written += [key for key in now if not torch.equal(now[key], returned[key])]
        import_adapter(model, PeftAdapter(tensors=exported, config=saved.config))
    return _Trip(
        imported=imported,
        exported=exported,
        returned=returned,
        refused=refused,
        replaced=replaced,
        aliased=aliased,
        accepted=accepted,
        written=written,
    )


def _parameters(adapter: LoraAdapter) -> dict[str, nn.Parameter]:
    return {
        row.init_key: factors.get_parameter(row.param) for factors in adapter.factors() for row in factors.plan.rows
    }


def _made(context: Context) -> tuple[ParameterTable, Problem, _Trip]:
    subject, problem = context.subject, make_problem(context.subject)
    trip = context.keep(
        "round trip", lambda: context.world(_trip, Layout(), subject, base_directory(subject), problem)[0]
    )
    return subject.table(RunFacts()), problem, trip


def _round_trip(context: Context) -> Iterator[Finding]:
    table, problem, trip = _made(context)
    names = {row: context.subject.selected.export_tensor(row, problem.factors[row.init_key]) for row in table.rows}
    yield from _exact(context, table, "factor after import", trip.imported, problem.factors)
    for row in table.rows:
        if row.init_key in trip.replaced:
            cause = "import put a new parameter in its place: optimizer and gradient buffers hold the old one"
            yield factor_finding("factor after import", row, cause=cause)
    for row, tensors in names.items():
        for name, tensor in tensors.items():
            if name not in trip.exported:
                yield factor_finding("exported tensor", row, cause=f"{name} is missing: a tensor is skipped")
            elif not torch.equal(trip.exported[name], tensor):
                error = relative_error(trip.exported[name], tensor)
                others = {other: value for one in names.values() for other, value in one.items() if other != name}
                cause = likely_cause(trip.exported[name], tensor, Suspects(others=others))
                yield factor_finding("exported tensor", row, cause=f"{name}: {cause}", error=error, bound=0.0)
            elif name in trip.aliased:
                yield factor_finding("exported tensor", row, cause=f"{name} changes with the parameter: it is a view")
    if trip.refused:
        yield Finding(what="import of the export", cause=trip.refused)
    else:
        yield from _exact(context, table, "factor after export and import", trip.returned, problem.factors)
    left = trip.exported.keys() - {name for tensors in names.values() for name in tensors}
    for name in sorted(left):
        yield Finding(what="exported tensor", cause=f"{name} belongs to no factor")


def _exact(
    context: Context, table: ParameterTable, what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Iterator[Finding]:
    for row in table.rows:
        context.exercised([row.host_module])
        value, wanted = actual.get(row.init_key), expected[row.init_key]
        if value is None or not torch.equal(value, wanted):
            others = {key: other for key, other in expected.items() if key != row.init_key}
            cause = "is missing" if value is None else likely_cause(value, wanted, Suspects(others=others))
            error = None if value is None else relative_error(value, wanted)
            yield factor_finding(what, row, cause=cause, error=error, bound=0.0)


def _incomplete(context: Context) -> Iterator[Finding]:
    table, _, trip = _made(context)
    if trip.refused:
        yield Finding(what="import", cause="not tried: the complete export is refused already, see `round-trip`")
    owner = {
        name: row
        for row in table.rows
        for name in context.subject.selected.export_tensor(row, torch.empty(row.full_shape, device="meta"))
    }
    for name in trip.accepted:
        context.exercised([owner[name].host_module])
        yield factor_finding("import", owner[name], cause=f"an adapter without {name} is accepted")
    by_key = {row.init_key: row for row in table.rows}
    for key in dict.fromkeys(trip.written):
        yield factor_finding("import", by_key[key], cause="a refused adapter was written in part")
    context.exercised(row.host_module for row in table.rows)


CHECKS = (
    Check(
        name="round-trip",
        level=Level.SINGLE,
        proves="Import, export, file and import again keep every factor bit for bit; exports are no views.",
        run=_round_trip,
        needs=("build-model",),
    ),
    Check(
        name="incomplete-import",
        level=Level.SINGLE,
        proves="An adapter that lacks any one tensor is refused, and nothing of it is written.",
        run=_incomplete,
        needs=("build-model",),
    ),
)
