"""`lora-plugins describe`: the parameter table of one run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins_sdk.cli.render import markdown_table, print_table
from lora_plugins_sdk.cli.table_rows import COLUMNS, table_rows
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.selection import load_plugin
from lora_plugins_sdk.table import derive_table

_LORA = LoraConfig()


class OutputFormat(StrEnum):
    """How `describe` prints the table."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def describe(
    architecture: Annotated[str, typer.Argument(metavar="ARCH", help="Architecture, as `lora-plugins list` names it.")],
    hf_config: Annotated[Path, typer.Option(help="HF config.json, or a directory that holds one.")],
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.")] = 1,
    dp: Annotated[int, typer.Option(help="Data parallel size.")] = 1,
    cp: Annotated[int, typer.Option(help="Context parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel size.")] = 1,
    etp: Annotated[int | None, typer.Option(help="Expert tensor parallel size. [the tensor parallel size]")] = None,
    sp: Annotated[bool, typer.Option("--sp", help="Sequence parallelism; needs --tp 2 or more.")] = False,
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="Where the model pads its vocabulary further than to TP: Megatron-LM's number.")
    ] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank r.")] = _LORA.rank,
    alpha: Annotated[float, typer.Option(help="The delta is scaled by alpha / r.")] = _LORA.alpha,
    targets: Annotated[
        list[str] | None,
        typer.Option(help="`all-linear`, HF or Megatron names, paths, wildcards; commas or repeated. [all-linear]"),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Taken away from the targets; same vocabulary.")] = None,
    scope: Annotated[str, typer.Option(help="Part of a multimodal model: all, language or vision.")] = _LORA.scope,
    expert_sharing: Annotated[
        str, typer.Option(help="Factors of routed experts: none or outer, which shares the hidden side's.")
    ] = _LORA.expert_sharing,
    dtype: Annotated[str, typer.Option(help="Storage dtype of the factors.")] = _LORA.dtype,
    plugin: Annotated[
        str | None,
        typer.Option(help="Plugin name or the path of a .py file, where two serve one architecture."),
    ] = None,
    output_format: Annotated[
        OutputFormat,
        typer.Option("--format", help="`table` and `markdown` fold equal layers; `json` has every row."),
    ] = OutputFormat.TABLE,
) -> None:
    """Print every LoRA factor's shapes, partition, gradient-sum group and names. Needs no GPU."""
    lora = LoraConfig(
        rank=rank,
        alpha=alpha,
        target_modules=_LORA.target_modules if targets is None else _split(targets),
        exclude_modules=_split(exclude or []),
        scope=scope,
        expert_sharing=expert_sharing,
        dtype=dtype,
    )
    facts = RunFacts(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        etp=tp if etp is None else etp,
        sequence_parallel=sp,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
    )
    selected = load_plugin(architecture=architecture, plugin=plugin)
    table = derive_table(selected, read_hf_config(hf_config), lora, facts)
    if output_format is OutputFormat.JSON:
        print(table.to_json())
    elif output_format is OutputFormat.MARKDOWN:
        print(markdown_table(COLUMNS, table_rows(table)))
    else:
        print_table(COLUMNS, table_rows(table))


def _split(values: list[str]) -> tuple[str, ...]:
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())
