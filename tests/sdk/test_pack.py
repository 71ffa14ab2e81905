"""Packs: every layout between HF rows and host rows, in both directions."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins_sdk import BlockLayout, Concat, LoraError, ModelDims, Pack, QueryGroups
from lora_plugins_sdk.block_layout import slabs_of
from lora_plugins_sdk.host_rows import HostOrder, interleave
from lora_plugins_sdk.shards import local_rows

HfRow = tuple[int, int]  # (projection, HF row)


class Case(NamedTuple):
    """A pack with sections that it accepts."""

    pack: Pack
    config: dict[str, int]
    sections: list[list[int]]
    tp: int
    multiple: int = 1

    @property
    def layout(self) -> BlockLayout:
        return self.pack.resolve(ModelDims(self.config), self.sections, self.tp, self.multiple)

    @property
    def everything(self) -> list[HfRow]:
        return [(index, row) for index, counts in enumerate(self.sections) for row in range(sum(counts))]


@st.composite
def packs(draw: st.DrawFn) -> Case:
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    shares = [[draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 4)))]
    kind = draw(st.sampled_from(["concat", "padded", "groups", "gated"]))
    if kind == "concat":
        return Case(Concat(), {}, [[tp * count for count in counts] for counts in shares], tp)
    if kind == "padded":
        return Case(Concat(pad=True), {}, shares, tp, draw(st.integers(1, 4)))
    config = {"groups": tp * draw(st.integers(1, 3)), "heads_per_group": draw(st.integers(1, 3))}
    pack = QueryGroups(groups="groups")
    if kind == "gated":
        shares[0] = [2 * config["heads_per_group"] * draw(st.integers(1, 3))]
        pack = QueryGroups(groups="groups", gated_heads="groups * heads_per_group")
    return Case(pack, config, [[config["groups"] * count for count in counts] for counts in shares], tp)


@given(packs())
def test_host_order_is_a_permutation_of_all_hf_rows(case: Case) -> None:
    host = case.layout.host_index()
    assert len(host) == case.layout.host_rows
    assert sorted((projection, row) for projection, row in host if row is not None) == case.everything
    if case.pack != Concat(pad=True):
        assert len(host) == len(case.everything)


def parts_of_rank(layout: BlockLayout, rank: int, tp: int) -> list[torch.Tensor]:
    """The HF rows that a rank reads of every projection, each row holding its own (projection, number)."""
    return [
        local_rows(
            layout.split(projection, tp),
            rank,
            lambda start, stop, projection=projection: torch.tensor(
                [(projection + 1, row + 1) for row in range(start, stop)], dtype=torch.long
            ).view(-1, 2),
        )
        for projection in range(len(layout.sections))
    ]


def numbered(rows: torch.Tensor) -> list[tuple[int, int | None]]:
    return [(int(projection) - 1, int(row) - 1 if row else None) for projection, row in rows.tolist()]


@given(packs())
def test_each_rank_reads_exactly_its_part_of_the_host_order(case: Case) -> None:
    """B2, B23: the slabs that a rank reads, interleaved, are the rank's part of the one host order."""
    layout, tp = case.layout, case.tp
    host = layout.host_index()
    local = layout.host_rows // tp
    for rank in range(tp):
        mine = numbered(interleave(layout, tp, parts_of_rank(layout, rank, tp)))
        expected = host[rank * local : (rank + 1) * local]
        # A padding row is zero: it does not say whose it is.
        assert mine == [(projection if row is not None else -1, row) for projection, row in expected]


@given(packs())
def test_host_columns_of_a_projection_lead_back_to_its_slabs(case: Case) -> None:
    """The branch's view of a block and its way back are inverse to each other, padding included."""
    layout, tp = case.layout, case.tp
    for projection in range(len(layout.sections)):
        order = HostOrder(layout, projection, tp)
        rows = torch.arange(sum(section.local for section in layout.split(projection, tp)) * 2).view(-1, 2)
        assert torch.equal(order.from_host(order.to_host(rows).clone()), rows)


@given(packs())
def test_slabs_of_all_ranks_are_every_row_once(case: Case) -> None:
    """B42: padding comes at the very end of a section; no rank's part is shifted by it."""
    layout, tp = case.layout, case.tp
    for projection, counts in enumerate(case.sections):
        sections = layout.split(projection, tp)
        read = [
            row
            for rank in range(tp)
            for slab in slabs_of(sections, rank)
            for row in range(slab.hf, slab.hf + slab.rows)
        ]
        assert sorted(read) == list(range(sum(counts)))
        assert all(0 <= section.local * tp - section.hf < tp * case.multiple for section in sections)


def rows(projection: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [(projection, row) for row in numbers]


def test_query_groups_put_each_groups_queries_before_its_key_and_value() -> None:
    layout = QueryGroups().resolve(ModelDims({"num_key_value_heads": 2}), [[8], [2], [2]], tp=2)
    q, k, v = 0, 1, 2
    assert layout.host_index() == [
        *[(q, 0), (q, 1), (q, 2), (q, 3), (k, 0), (v, 0)],
        *[(q, 4), (q, 5), (q, 6), (q, 7), (k, 1), (v, 1)],
    ]


def test_gated_query_groups_part_the_queries_from_their_gates() -> None:
    """Two groups of two heads of width two: HF has [q0 g0 q1 g1 | q2 g2 q3 g3], a group of the host [q0 q1 g0 g1]."""
    pack = QueryGroups(gated_heads="num_attention_heads")
    config = {"num_key_value_heads": 2, "num_attention_heads": 4}
    layout = pack.resolve(ModelDims(config), [[16], [4], [4]], tp=2)
    q, k, v = 0, 1, 2
    assert layout.host_index() == [
        *rows(q, [0, 1, 4, 5, 2, 3, 6, 7]),
        *rows(k, [0, 1]),
        *rows(v, [0, 1]),
        *rows(q, [8, 9, 12, 13, 10, 11, 14, 15]),
        *rows(k, [2, 3]),
        *rows(v, [2, 3]),
    ]
    # One product per projection and block suffices; the branch needs no further cut.
    assert [layout.spans(projection) for projection in range(3)] == [((0, 8),), ((8, 2),), ((10, 2),)]


def test_concat_puts_each_shards_gate_before_its_up() -> None:
    """B23: gate|up halves alternate per TP shard, not once for the whole weight."""
    layout = Concat().resolve(ModelDims({}), [[4], [4]], tp=2)
    gate, up = 0, 1
    assert layout.host_index() == [
        *[(gate, 0), (gate, 1), (up, 0), (up, 1)],
        *[(gate, 2), (gate, 3), (up, 2), (up, 3)],
    ]


def test_concat_splits_each_section_on_its_own() -> None:
    """B23: a rank holds its part of the queries, the keys and the values, not the first rows of the three together."""
    layout = Concat().resolve(ModelDims({}), [[2, 2, 4], [4]], tp=2)
    qkv, z = 0, 1
    assert layout.host_index() == [
        *rows(qkv, [0, 2, 4, 5]),
        *rows(z, [0, 1]),
        *rows(qkv, [1, 3, 6, 7]),
        *rows(z, [2, 3]),
    ]
    # A rank's sections lie side by side: one product, and its B needs no other order.
    assert layout.spans(qkv) == ((0, 4),) and layout.local_order(qkv, 2) == ((0, 4),)


@pytest.mark.parametrize(
    ("pack", "sections", "tp", "message"),
    [
        (Concat(), [[8], [9]], 2, r"tensor parallel size 2: does not divide a projection of 9 rows"),
        (Concat(), [[8, 9]], 2, r"tensor parallel size 2: does not divide a projection of 9 rows"),
        (QueryGroups(), [[8], [2], [2]], 4, r"tensor parallel size 4: does not divide the 2 key/value heads"),
        (QueryGroups(), [[8], [3], [2]], 1, r"num_key_value_heads=2: does not divide 3 rows of a projection"),
        (QueryGroups(gated_heads="3"), [[12], [2], [2]], 1, r"num_key_value_heads=2: does not divide 3 query heads"),
        (QueryGroups(gated_heads="4"), [[12], [2], [2]], 1, r"2 \* 4=8: does not divide 12 rows of a projection"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(pack: Pack, sections: list[list[int]], tp: int, message: str) -> None:
    with pytest.raises(LoraError, match=message):
        pack.resolve(ModelDims({"num_key_value_heads": 2}), sections, tp)
