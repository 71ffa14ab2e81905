"""The parameter table for reading: layers that differ in nothing but the number are folded into one row."""

from __future__ import annotations

from collections.abc import Iterable

from lora_plugins_sdk.table import ParameterTable, ParamRow

COLUMNS = ("LAYERS", "FACTOR", "FULL SHAPE", "LOCAL SHAPE", "SPLIT DIM", "GRAD SUM", "HF NAME", "SGLANG NAME")


def table_rows(table: ParameterTable) -> list[tuple[str, ...]]:
    """One tuple of cells, in the order of `COLUMNS`, for each group of equal rows."""
    layers: dict[tuple[str, ...], list[int]] = {}
    for row in table.rows:
        numbers = layers.setdefault(_cells(row), [])
        if row.layer is not None:
            numbers.append(row.layer)
    return [(_ranges(numbers), *cells) for cells, numbers in layers.items()]


def _cells(row: ParamRow) -> tuple[str, ...]:
    return (
        row.factor,
        _shape(row.full_shape),
        _shape(row.local_shape),
        "-" if row.partition_dim < 0 else str(row.partition_dim),
        "pinned" if row.pinned else row.grad_sum_group or "-",
        _without_layer(row.hf_name, row.layer),
        _without_layer(row.serving_names.get("sglang", "-"), row.layer),
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _without_layer(name: str, layer: int | None) -> str:
    """The name with `*` for the layer number, the first path component equal to it."""
    return name if layer is None else name.replace(f".{layer}.", ".*.", 1)


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0 1 2 3 7; `-` for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "-"
