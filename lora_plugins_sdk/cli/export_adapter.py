"""`lora-plugins export`: an adapter written anew, for PEFT or for a serving engine."""

from __future__ import annotations

import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins_sdk.cli.needs import require_tensors
from lora_plugins_sdk.cli.render import size_text
from lora_plugins_sdk.errors import LoraError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Form(StrEnum):
    """Whom an adapter is written for."""

    PEFT = "peft"
    SGLANG = "sglang"


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500 MB`, `64MiB` or a plain number.

    Raises:
        LoraError: it is no size.
    """
    found = re.fullmatch(r"(\d{1,15})\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or int(found[1]) == 0:
        raise LoraError(
            f"--max-shard-size {text}", reason="is no size", cure="give a number with KB, MB, GB, MiB or GiB, e.g. 2GB"
        )
    return int(found[1]) * _UNITS[found[2].upper()]


def export_adapter(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="PEFT directory, checkpoint (RUN/checkpoints/step-N) or finished run."),
    ],
    output: Annotated[Path, typer.Option(help="Directory to make; appears whole or not at all.")],
    form: Annotated[
        Form, typer.Option("--for", help="PEFT itself, or the engine that is to serve the adapter.")
    ] = Form.PEFT,
    base: Annotated[
        Path | None,
        typer.Option(
            help="HF directory of the base; names of other schemas that its model's plugin knows become HF's. "
            "[for an engine: the directory that the adapter's config names]"
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Split the tensors into files of at most this, e.g. 2GB. [one file]"),
    ] = None,
) -> None:
    """Write an adapter anew: with a config that every PEFT version reads, or in the terms of a serving engine.

    The tensors keep their values. The same adapter gives the same bytes, whatever it was trained under. PEFT reads
    adapters in one file only; `lora-plugins` and SGLang read several.

        lora-plugins export runs/a/checkpoints/step-000050 --output adapters/a50

        lora-plugins export runs/a --output serving/a --for sglang --base models/qwen3
    """
    size = None if max_shard_size is None else parse_size(max_shard_size)
    require_tensors("export")
    from lora_plugins_sdk.offline.export import export_files

    report = export_files(path, output, form=str(form), base=base, max_shard_bytes=size)
    files = "1 file" if len(report.files) == 1 else f"{len(report.files)} files"
    print(f"written: {report.directory}: {report.tensors} tensors in {files}, {size_text(report.num_bytes)}")
    for name, reason in report.left_out.items():
        print(f"left out: {name} ({reason})")
    if report.not_compared is not None:
        print(f"note: the factors were not compared with the base's weights: {report.not_compared}")
    if report.engine_arguments:
        print(f"serve it with: {shlex.join(report.engine_arguments)}")
    if report.unpublished:
        print(
            "note: serve it beside the published checkpoint; of this base SGLang would build another model: its "
            f"config.json lacks {', '.join(report.unpublished)} in its text_config"
        )
