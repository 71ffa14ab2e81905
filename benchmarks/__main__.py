"""Run every benchmark, each in a process of its own, and say which goals were met."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.command import arguments
from benchmarks.report import print_goals

NAMES = ("branch_cost", "branch_forms", "communication", "training_step", "offline_merge", "grouped_experts")


def main() -> None:
    """Run all; a benchmark that fails stops the rest."""
    given = arguments(__doc__)
    for name in NAMES:
        print(f"\n== benchmarks.{name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--output", str(given.output)], check=True)
    print_goals([goal for name in NAMES for goal in json.loads((given.output / f"{name}.json").read_text())["goals"]])


if __name__ == "__main__":
    main()
