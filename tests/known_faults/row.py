"""What is said of one known fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One known fault.

    Args:
        cure: what keeps it away; the tests fail without it.
        tests: `file::function`; its docstring, or the file's, names the row.
        mutants: names of mutants that imitate it, which the conformance kit kills.
        open: what of the row is not guarded, and why.
    """

    cure: str
    tests: tuple[str, ...] = ()
    mutants: tuple[str, ...] = ()
    open: str = ""
