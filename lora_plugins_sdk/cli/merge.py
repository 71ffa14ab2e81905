"""`lora-plugins merge`: an adapter folded into a copy of its base."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lora_plugins_sdk.cli.needs import require_tensors
from lora_plugins_sdk.cli.render import size_text
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from lora_plugins_sdk.offline.merge import MergePlan, MergeReport

# A loss of the delta that a user should hear of.
_NOTABLE = 0.01


class WeightDtype(StrEnum):
    """Dtypes a merged model can be stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _refuse_unmerge(asked: bool) -> None:
    if asked:
        raise LoraError(
            "--unmerge",
            reason="the merged weights were rounded, so taking the delta away again does not give the base back",
            cure="use the base directory that was merged from: merging left it as it was",
        )


def merge(
    base: Annotated[Path, typer.Option(help="HF directory of the base; it is only read.")],
    adapter: Annotated[Path, typer.Option(help="PEFT directory of the adapter, checkpoint or finished run.")],
    output: Annotated[Path, typer.Option(help="Directory to make; appears whole or not at all.")],
    dtype: Annotated[
        WeightDtype | None,
        typer.Option(help="Dtype of every floating point tensor. [each tensor's own]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")] = False,
    unmerge: Annotated[
        bool,
        typer.Option("--unmerge", is_eager=True, callback=_refuse_unmerge, help="Refused: says why, and what to do."),
    ] = False,
) -> None:
    """Fold an adapter into a copy of its base. Needs no GPU, no plugin, and memory for a few rows of one weight.

    Every factor pair must find its weight by name and shape, else nothing is written. The sums are made in float32 and
    cast to the base's dtype. What is no weight is copied as it is.

        lora-plugins merge --base models/qwen3 --adapter runs/a/adapter --output models/qwen3-a
    """
    require_tensors("merge")
    from lora_plugins_sdk.offline.merge import merge as run_merge
    from lora_plugins_sdk.offline.merge import plan_merge

    plan = plan_merge(base, adapter, output, None if dtype is None else str(dtype))
    _print_plan(plan)
    if dry_run:
        print("dry run: nothing was written")
        return
    console = Console(stderr=True)
    columns = (TextColumn("merging"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("merging", total=plan.read_bytes)
        report = run_merge(plan, lambda size: progress.advance(task, size))
    _print_report(plan, report)


def _print_plan(plan: MergePlan) -> None:
    lora, tensors = plan.adapter.lora, len(plan.base.where)
    print(
        f"{len(plan.adapter.pairs)} deltas (rank {lora.rank}, scale {lora.scale:g}) into {tensors} tensors in "
        f"{len(plan.base.headers)} weight files, {size_text(plan.write_bytes)}; {len(plan.others.taken)} other files"
    )
    for fold in (one for folds in plan.folds.values() for one in folds):
        if fold.trimmed:
            print(f"trimmed: {fold.trimmed} zero rows of {fold.pair.module} beyond the base's vocabulary")
    for path, reason in plan.others.left.items():
        print(f"left out: {path} ({reason})")


def _print_report(plan: MergePlan, report: MergeReport) -> None:
    print(f"written: {plan.output}: {report.changed} of {report.tensors} tensors changed")
    if report.delta_norm == 0.0:
        print("note: the adapter's delta is zero, so the result is the base")
    elif report.lost_norm > _NOTABLE * report.delta_norm:
        share = report.lost_norm / report.delta_norm
        print(
            f"note: the weights' dtype rounds away {share:.0%} of the delta (Frobenius norm); "
            "--dtype float32 keeps it, and so does serving the adapter beside the base"
        )
