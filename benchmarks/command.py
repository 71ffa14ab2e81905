"""What every benchmark's command line has in common."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path


def arguments(
    description: str | None, *, rounds: int | None = None, more: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """Parse the command line of one benchmark.

    Args:
        description: the benchmark's docstring.
        rounds: default number of measured rounds; None where nothing is timed.
        more: adds options of this benchmark.

    Returns:
        `output` (a directory that exists), `rounds` unless None, and whatever `more` added.
    """
    # megatron-core's remarks about accelerators that are not installed.
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="directory of the JSON report")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds (default {rounds})")
    if more is not None:
        more(parser)
    given = parser.parse_args()
    if rounds is not None and given.rounds < 1:
        parser.error("--rounds must be 1 or more")
    given.output.mkdir(parents=True, exist_ok=True)
    return given
