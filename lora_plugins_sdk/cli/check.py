"""`lora-plugins check`: the conformance kit without pytest."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_plugins_sdk.cli.render import print_table

if TYPE_CHECKING:
    from lora_plugins_sdk.testing.conformance import Context, Level, Result

_HIGHEST = 3


class ReportFormat(StrEnum):
    """How `check` reports."""

    TEXT = "text"
    JSON = "json"


def check(
    architecture: Annotated[str, typer.Argument(metavar="ARCH", help="Architecture, as `lora-plugins list` names it.")],
    hf_config: Annotated[
        Path | None,
        typer.Option(help="Tiny HF config.json, or a directory that holds one; the architecture's own if left out."),
    ] = None,
    level: Annotated[
        int,
        typer.Option(min=0, max=_HIGHEST, help="Highest level: 0 static, 1 one process, 2 parallel layouts, 3 GPU."),
    ] = _HIGHEST,
    report: Annotated[
        ReportFormat, typer.Option(help="`json` prints one object and nothing else.")
    ] = ReportFormat.TEXT,
    plugin: Annotated[
        str | None, typer.Option(help="Plugin name or the path of a .py file, where two serve one architecture.")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="File with the accepted parameter table, to compare with.")
    ] = None,
    update_snapshot: Annotated[bool, typer.Option("--update-snapshot", help="Write that file.")] = False,
    expert_sharing: Annotated[
        str, typer.Option(help="Adapters on routed experts: none has factors for each, outer shares the hidden side's.")
    ] = "none",
    rank: Annotated[
        int,
        typer.Option(
            min=2, help="Rank of the adapter, for a config with a side narrower than 8; alpha is 1.5 times it."
        ),
    ] = 8,
    seed: Annotated[int, typer.Option(help="Seed of base weights, adapter and batches.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the test ranks print.")] = False,
) -> None:
    """Check a plugin against one process, transformers and PEFT on this CPU; exits with 1 when it does not conform."""
    from lora_plugins_sdk.errors import LoraError
    from lora_plugins_sdk.testing.conformance import Context, Level, Subject
    from lora_plugins_sdk.testing.conformance.parts import require_parts
    from lora_plugins_sdk.testing.conformance.report import as_json

    if update_snapshot and snapshot is None:
        raise LoraError("--update-snapshot", reason="there is no file to write", cure="give --snapshot FILE")
    require_parts(Level(level))
    subject = Subject.of(
        architecture, hf_config=hf_config, plugin=plugin, expert_sharing=expert_sharing, rank=rank, seed=seed
    )
    subject.refuse_options()
    context = Context(
        subject,
        snapshot=snapshot,
        update_snapshot=update_snapshot,
        how_to_update=f"--snapshot {snapshot} --update-snapshot",
    )
    asked = [one for one in Level if one <= level]
    results = _run(context, asked, text=report is ReportFormat.TEXT, verbose=verbose)
    if report is ReportFormat.JSON:
        print(json.dumps(as_json(subject.site_modules(), results, asked), indent=2))
    else:
        _print_report(context, results, asked)
    raise typer.Exit(0 if all(one.status.good for one in results) else 1)


def _run(context: Context, levels: list[Level], *, text: bool, verbose: bool) -> list[Result]:
    """Every case of these levels; progress as it comes, on standard error where standard output is for a program."""
    from lora_plugins_sdk.testing.conformance import cases, run_case
    from lora_plugins_sdk.testing.conformance.layouts import layouts_of

    progress = sys.stdout if text else sys.stderr
    results = []
    for level in levels:
        print(f"== {level.title}", file=progress, flush=True)
        for case in cases(level, layouts_of(context.subject.selected.architecture)):
            # What ranks print would drown the report.
            with contextlib.redirect_stdout(sys.stderr if verbose else io.StringIO()):
                result = run_case(context, case)
            results.append(result)
            print(f"{case.id:34} {result.status} ({result.seconds:.1f} s)", file=progress, flush=True)
    return results


def _print_report(context: Context, results: list[Result], asked: list[Level]) -> None:
    from lora_plugins_sdk.testing.conformance.coverage import coverage_of
    from lora_plugins_sdk.testing.conformance.report import failure_text, not_run_lines, summary_lines, unseen_lines

    sites = context.subject.site_modules()
    for one in results:
        if not one.status.good:
            print(f"\nFAILED {failure_text(one)}")
    print("\n== sites x checks: how many of a site's linears each check measured")
    print_table(*coverage_of(sites, results).table())
    print()
    for line in [*summary_lines(results), *not_run_lines(asked), *unseen_lines(sites, results)]:
        print(line)
