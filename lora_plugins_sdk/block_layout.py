"""A resolved pack: which host row holds which HF row, on every rank, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive host rows that are consecutive rows of one section.

    Args:
        projection: index of the projection.
        section: index of the section within it.
        row: the first of them, counted within the section's rows of one block.
        rows: how many.
    """

    projection: int
    section: int = 0
    row: int = 0
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Rows of one projection that TP splits on their own.

    Args:
        hf: rows in HF.
        local: rows on every rank, host padding included; `local * ranks - hf` rows at the very end are padding.
    """

    hf: int
    local: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slab:
    """One rank's rows of one section.

    Args:
        local: the first of them among the rank's rows of the projection, which are its sections one after the other.
        hf: the first of them among the projection's HF rows.
        rows: how many HF has; host padding follows up to the section's `local` rows.
    """

    local: int
    hf: int
    rows: int


def slabs_of(sections: Sequence[Section], rank: int) -> Iterator[Slab]:
    """What a rank holds of each section, in order."""
    local = hf = 0
    for section in sections:
        start = min(rank * section.local, section.hf)
        stop = min(start + section.local, section.hf)
        yield Slab(local=local, hf=hf + start, rows=stop - start)
        local += section.local
        hf += section.hf


def padding_of(sections: Sequence[Section], rank: int) -> Iterator[slice]:
    """Which of a rank's rows HF does not have, among its sections one after the other."""
    for section, slab in zip(sections, slabs_of(sections, rank), strict=True):
        if slab.rows < section.local:
            yield slice(slab.local + slab.rows, slab.local + section.local)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """A resolved pack.

    Args:
        blocks: number of blocks in the full host weight; a multiple of the TP size.
        runs: the rows of one block, in host order.
        sections: HF rows of each section of each projection. A section may have fewer than its blocks hold; the rest,
            at its very end, is padding that HF does not have.
    """

    blocks: int
    runs: tuple[Run, ...]
    sections: tuple[tuple[int, ...], ...]

    @classmethod
    def in_order(
        cls, *, blocks: int, shares: Sequence[Sequence[int]], sections: Sequence[Sequence[int]]
    ) -> BlockLayout:
        """Blocks that hold one run of each section, in order.

        Args:
            blocks: number of blocks.
            shares: rows of each section of each projection in one block.
            sections: HF rows of the same.
        """
        runs = tuple(
            Run(projection=projection, section=section, rows=rows)
            for projection, counts in enumerate(shares)
            for section, rows in enumerate(counts)
        )
        return cls(blocks=blocks, runs=runs, sections=tuple(tuple(counts) for counts in sections))

    @property
    def block_rows(self) -> int:
        """Host rows in one block."""
        return sum(run.rows for run in self.runs)

    @property
    def host_rows(self) -> int:
        """Rows of the full host weight, padding included."""
        return self.blocks * self.block_rows

    def rows(self, projection: int) -> int:
        """HF rows of a projection."""
        return sum(self.sections[projection])

    def split(self, projection: int, tp: int) -> tuple[Section, ...]:
        """How a projection's rows are split over `tp` ranks."""
        blocks = self.blocks // tp
        return tuple(
            Section(hf=rows, local=blocks * share)
            for rows, share in zip(self.sections[projection], self._shares(projection), strict=True)
        )

    def spans(self, projection: int) -> tuple[tuple[int, int], ...]:
        """Where a block holds a projection: (first row within the block, rows), adjacent runs joined."""
        placed, start = [], 0
        for run in self.runs:
            if run.projection == projection:
                placed.append((start, run.rows))
            start += run.rows
        return _joined(placed)

    def local_order(self, projection: int, tp: int) -> tuple[tuple[int, int], ...]:
        """A rank's rows of a projection (its slabs one after the other) in the order in which the host has them: (first
        row, rows), adjacent ones joined. The same on every rank; a single entry where the two orders are one.
        """
        blocks, shares = self.blocks // tp, self._shares(projection)
        starts = [blocks * sum(shares[:section]) for section in range(len(shares))]
        return _joined(
            (starts[run.section] + block * shares[run.section] + run.row, run.rows)
            for block in range(blocks)
            for run in self.runs
            if run.projection == projection
        )

    def host_index(self) -> list[tuple[int, int | None]]:
        """For every host row, in order: (projection, HF row); None as the HF row of padding."""
        index: list[tuple[int, int | None]] = []
        for block in range(self.blocks):
            for run in self.runs:
                counts = self.sections[run.projection]
                first = block * self._shares(run.projection)[run.section] + run.row
                for row in range(first, first + run.rows):
                    known = row < counts[run.section]
                    index.append((run.projection, sum(counts[: run.section]) + row if known else None))
        return index

    def _shares(self, projection: int) -> list[int]:
        """Rows of each section of a projection in one block."""
        shares = [0] * len(self.sections[projection])
        for run in self.runs:
            if run.projection == projection:
                shares[run.section] += run.rows
        return shares


def _joined(ranges: Sequence[tuple[int, int]] | Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, rows in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + rows)
        else:
            joined.append((start, rows))
    return tuple(joined)
