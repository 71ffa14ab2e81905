"""Rows of text as a terminal table or a markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; as wide as it needs to be when that is not a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_UNBOUNDED)
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; bars within cells are escaped."""
    lines = [
        list(columns),
        ["---"] * len(columns),
        *[[cell.replace("|", "\\|") for cell in row] for row in rows],
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size_text(size: int) -> str:
    """Bytes for reading: `1.5 GB`, in powers of 1000."""
    value, units = float(size), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
