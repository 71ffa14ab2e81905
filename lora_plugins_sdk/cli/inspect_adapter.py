"""`lora-plugins inspect`: what an adapter directory holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_plugins_sdk.cli.needs import require_tensors
from lora_plugins_sdk.cli.render import print_table, size_text

if TYPE_CHECKING:
    from lora_plugins_sdk.adapter_meta import AdapterMeta
    from lora_plugins_sdk.offline.adapter import PlainAdapter
    from lora_plugins_sdk.offline.inspect import BaseFacts, PairFacts

_COLUMNS = ("MODULES", "COUNT", "[OUT, IN]", "|A|", "|B|", "|SCALE B A| MIN", "MEDIAN", "MAX")


def inspect_adapter(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="PEFT directory of an adapter, checkpoint or finished run.")
    ],
    base: Annotated[
        Path | None, typer.Option(help="HF directory: also say what the adapter would change there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every module.")] = False,
) -> None:
    """Show an adapter's rank, scale, targets and norms; exits with 1 when it does not fit the given base."""
    require_tensors("inspect")
    from lora_plugins_sdk.adapter_files import adapter_directory
    from lora_plugins_sdk.adapter_meta import engine_problems, read_meta
    from lora_plugins_sdk.offline.adapter import read_plain_adapter
    from lora_plugins_sdk.offline.inspect import base_facts, pair_facts

    adapter = read_plain_adapter(adapter_directory(path), base)
    summary = {**_summary(adapter), **_origin(read_meta(adapter.directory))}
    pairs = pair_facts(adapter)
    against = None if base is None else base_facts(adapter, base)
    if as_json:
        record = {**summary, "modules": [asdict(one) for one in pairs]}
        if against is not None:
            record["base"] = asdict(against)
        print(json.dumps(record, indent=2))
    else:
        for key, value in summary.items():
            print(f"{key:22} {_text(key, value)}")
        print()
        print_table(_COLUMNS, _rows(pairs))
        if all(one.norm_delta == 0.0 for one in pairs):
            print("\nnote: every delta is zero, the adapter changes nothing")
        if against is not None:
            _print_base(base, against)
        else:
            for problem in engine_problems(str(adapter.directory), adapter.saved.origin):
                print(f"\nnote: {problem}")
    raise typer.Exit(1 if against is not None and against.problems else 0)


def _summary(adapter: PlainAdapter) -> dict[str, Any]:
    config, tensors = adapter.config, adapter.saved.tensors
    return {
        "rank": adapter.lora.rank,
        "alpha": adapter.lora.alpha,
        "use_rslora": adapter.lora.use_rslora,
        "scale": adapter.lora.scale,
        "target_modules": config.get("target_modules"),
        "base_model": config.get("base_model_name_or_path"),
        "peft_version": config.get("peft_version"),
        "tensors": len(tensors),
        "whole_weights": sorted(adapter.wholes),
        "bytes": adapter.saved.num_bytes,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
    }


def _origin(meta: AdapterMeta | None) -> dict[str, Any]:
    if meta is None:
        return {"origin": None}
    origin = {"origin": "adapter_meta.json; every file is as it was written", **asdict(meta.origin)}
    return {**origin, "versions": dict(sorted(meta.versions.items()))}


def _text(key: str, value: Any) -> str:
    if key == "bytes":
        return size_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


def _rows(pairs: Sequence[PairFacts]) -> list[tuple[str, ...]]:
    from lora_plugins_sdk.offline.fit import kind_of

    groups: dict[tuple[str, int, int], list[PairFacts]] = {}
    for one in pairs:
        groups.setdefault((kind_of(one.module), one.out, one.width), []).append(one)
    return [
        (
            kind,
            str(len(group)),
            f"[{out}, {width}]",
            f"{median(one.norm_a for one in group):.4g}",
            f"{median(one.norm_b for one in group):.4g}",
            *(f"{statistic(one.norm_delta for one in group):.4g}" for statistic in (min, median, max)),
        )
        for (kind, out, width), group in groups.items()
    ]


def _print_base(base: Path | None, facts: BaseFacts) -> None:
    served = f"served by plugin {facts.plugin}" if facts.plugin else "no plugin serves it"
    print(f"\n{base}: model type {facts.model_type}, {served}\n")
    if facts.coverage:
        rows = [(one.kind, str(one.adapted), str(one.total)) for one in facts.coverage]
        print_table(("MODULES", "ADAPTED", "IN THE MODEL"), rows)
    for problem in facts.problems:
        print(f"PROBLEM {problem}")
