"""`lora-plugins diff`: how two adapters differ."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins_sdk.cli.needs import require_tensors
from lora_plugins_sdk.cli.render import print_table


def diff(
    one: Annotated[Path, typer.Argument(metavar="A", help="PEFT directory of an adapter, checkpoint or finished run.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="PEFT directory of another.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest entry of scale B A that may differ and still count as equal.")
    ] = 0.0,
    base: Annotated[
        Path | None,
        typer.Option(help="HF directory of their base: reads names of other schemas that its model's plugin knows."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every module.")] = False,
) -> None:
    """Compare two adapters' configs and products scale B A; exits with 1 when they differ.

    Factors are not compared by themselves: a rotation within the rank changes them and not the model.
    """
    require_tensors("diff")
    from lora_plugins_sdk.adapter_files import adapter_directory
    from lora_plugins_sdk.offline.adapter import read_plain_adapter
    from lora_plugins_sdk.offline.diff import diff_adapters

    found = diff_adapters(*(read_plain_adapter(adapter_directory(path), base) for path in (one, other)))
    differs = found.differs(tolerance)
    if as_json:
        print(json.dumps({"differs": differs, **asdict(found)}, indent=2))
        raise typer.Exit(1 if differs else 0)
    rows = [(key, str(left), str(right)) for key, (left, right) in found.config.items()]
    rows += [(module, str(list(left)), str(list(right))) for module, (left, right) in found.shapes.items()]
    rows += [(module, "adapted", "-") for module in found.only_a]
    rows += [(module, "-", "adapted") for module in found.only_b]
    if rows:
        print_table(("DIFFERENCE", "A", "B"), rows)
    changed = {module: delta for module, delta in found.deltas.items() if delta > tolerance}
    if changed:
        print_table(
            ("MODULE", "LARGEST DIFFERENCE OF SCALE B A"),
            [(module, f"{delta:.4g}") for module, delta in changed.items()],
        )
    print(f"{len(found.deltas) - len(changed)} of {len(found.deltas)} common modules are equal")
    if base is None and found.only_a and found.only_b and not found.deltas:
        print("note: no module is in both; if one has names of another schema, give the base (--base)")
    raise typer.Exit(1 if differs else 0)
