"""In `tests/`, `python -m mutants [--fast]`: hunt every mutant, or those that one process shows; print the table."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO

from lora_plugins_sdk.testing.conformance import Level
from mutants.catalogue import MUTANTS
from mutants.hunt import hunt
from mutants.table import lines, row


def main(arguments: list[str]) -> int:
    """Exit status 1 when a mutant lives."""
    if arguments not in ([], ["--fast"]):
        print("usage: python -m mutants [--fast]", file=sys.stderr)
        return 2
    chosen = [one for one in MUTANTS if not arguments or one.level < Level.PARALLEL]
    verdicts = []
    for mutant in chosen:
        with redirect_stdout(StringIO()):  # what ranks print
            verdicts.append(hunt(mutant))
        print("." if verdicts[-1].killed else "L", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for verdict in verdicts:
        if not verdict.killed:
            print(f"{verdict.explanation()}\n")
    print("\n".join(lines([row(one) for one in verdicts])))
    return 0 if all(one.killed for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
