"""A finding: one thing that a check measured and that is not as it must be."""

from __future__ import annotations

from dataclasses import dataclass

from lora_plugins_sdk.table import ParamRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong, where, by how much, and what most likely causes it.

    Args:
        what: the quantity, for example `gradient` or `exported tensor`.
        cause: the most likely cause, in words.
        site: host linear with the model-wide layer number; None when it concerns no single site.
        projection: HF module.
        factor: `"A"` or `"B"`.
        rank: global rank that holds the wrong value.
        error: measured error, relative to the largest entry of what was expected.
        bound: largest error that the check accepts.
    """

    what: str
    cause: str
    site: str | None = None
    projection: str | None = None
    factor: str | None = None
    rank: int | None = None
    error: float | None = None
    bound: float | None = None

    def __str__(self) -> str:
        place = [
            f"site {self.site}" if self.site else "",
            f"projection {self.projection}" if self.projection else "",
            f"factor {self.factor}" if self.factor else "",
            f"rank {self.rank}" if self.rank is not None else "",
        ]
        measured = "" if self.error is None else f": error {self.error:.2g}"
        measured += "" if self.bound is None else f" (at most {self.bound:.2g})"
        where = ", ".join(part for part in place if part)
        return f"{self.what}{' of ' if where else ''}{where}{measured} -> {self.cause}"


def factor_finding(
    what: str,
    row: ParamRow,
    *,
    cause: str,
    error: float | None = None,
    bound: float | None = None,
    rank: int | None = None,
) -> Finding:
    """A finding about one factor."""
    return Finding(
        what=what,
        cause=cause,
        site=row.host_module,
        projection=row.hf_module,
        factor=row.factor,
        rank=rank,
        error=error,
        bound=bound,
    )
