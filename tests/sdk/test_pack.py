"""Packs: every layout between HF rows and host rows, in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins_sdk import BlockLayout, Concat, LoraError, ModelDims, Pack, QueryGroups

HfRow = tuple[int, int]  # (projection, HF row)


def hf_rows_of_rank(layout: BlockLayout, rank: int, tp: int) -> list[HfRow]:
    """Local host rows of one TP rank from `hf_slab` and `runs` alone, the way a rank reads its slices from HF."""
    blocks = layout.blocks // tp
    local: list[HfRow] = []
    for block in range(blocks):
        for projection, run in enumerate(layout.runs):
            start, _ = layout.hf_slab(projection, rank, tp)
            local += [(projection, start + block * run + row) for row in range(run)]
    return local


@st.composite
def packs(draw: st.DrawFn) -> tuple[Pack, dict[str, int], list[int], int]:
    """A pack with rows that it accepts: (pack, config, rows, TP size)."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    projections = draw(st.integers(1, 4))
    if draw(st.booleans()):
        groups = tp * draw(st.integers(1, 3))
        rows = [groups * draw(st.integers(1, 5)) for _ in range(projections)]
        return QueryGroups(groups="groups"), {"groups": groups}, rows, tp
    rows = [tp * draw(st.integers(1, 6)) for _ in range(projections)]
    return Concat(), {}, rows, tp


@given(packs())
def test_host_order_is_a_permutation_of_all_hf_rows(case: tuple[Pack, dict[str, int], list[int], int]) -> None:
    pack, config, rows, tp = case
    layout = pack.resolve(ModelDims(config), rows, tp)
    index = layout.host_index()
    assert len(index) == layout.host_rows == sum(rows)
    assert sorted(index) == [(projection, row) for projection, count in enumerate(rows) for row in range(count)]


@given(packs())
def test_each_rank_reads_exactly_its_part_of_the_host_order(
    case: tuple[Pack, dict[str, int], list[int], int],
) -> None:
    """B2, B23: the slab that a rank reads, put in blocks, is the rank's part of the one host order."""
    pack, config, rows, tp = case
    layout = pack.resolve(ModelDims(config), rows, tp)
    assert [row for rank in range(tp) for row in hf_rows_of_rank(layout, rank, tp)] == layout.host_index()


@given(packs())
def test_host_columns_of_a_projection_lead_back_to_hf_order(
    case: tuple[Pack, dict[str, int], list[int], int],
) -> None:
    """Reading one projection block by block from the host gives HF's rows in order, rank after rank."""
    pack, config, rows, tp = case
    layout = pack.resolve(ModelDims(config), rows, tp)
    host = layout.host_index()
    for projection, count in enumerate(rows):
        run, offset = layout.runs[projection], layout.run_offset(projection)
        read = [host[block * layout.block_rows + offset + row] for block in range(layout.blocks) for row in range(run)]
        assert read == [(projection, row) for row in range(count)]


@given(count=st.integers(1, 40), tp=st.integers(1, 5))
def test_padding_comes_after_the_last_hf_row(count: int, tp: int) -> None:
    """B42: a padded vocabulary is trimmed at the very end; no rank's part is shifted by it."""
    layout = Concat(pad=True).resolve(ModelDims({}), [count], tp)
    host = layout.host_index()
    assert [row for _, row in host[:count]] == list(range(count))
    assert 0 <= layout.host_rows - count < tp
    slabs = [layout.hf_slab(0, rank, tp) for rank in range(tp)]
    assert [row for start, stop in slabs for row in range(start, stop)] == list(range(count))


def test_query_groups_put_each_groups_queries_before_its_key_and_value() -> None:
    layout = QueryGroups().resolve(ModelDims({"num_key_value_heads": 2}), [8, 2, 2], tp=2)
    q, k, v = 0, 1, 2
    assert layout.host_index() == [
        *[(q, 0), (q, 1), (q, 2), (q, 3), (k, 0), (v, 0)],
        *[(q, 4), (q, 5), (q, 6), (q, 7), (k, 1), (v, 1)],
    ]


def test_concat_puts_each_shards_gate_before_its_up() -> None:
    """B23: gate|up halves alternate per TP shard, not once for the whole weight."""
    layout = Concat().resolve(ModelDims({}), [4, 4], tp=2)
    gate, up = 0, 1
    assert layout.host_index() == [
        *[(gate, 0), (gate, 1), (up, 0), (up, 1)],
        *[(gate, 2), (gate, 3), (up, 2), (up, 3)],
    ]


@pytest.mark.parametrize(
    ("pack", "rows", "tp", "message"),
    [
        (Concat(), [8, 9], 2, r"tensor parallel size 2: does not divide a projection of 9 rows"),
        (QueryGroups(), [8, 2, 2], 4, r"tensor parallel size 4: does not divide the 2 key/value heads"),
        (QueryGroups(), [8, 3, 2], 1, r"num_key_value_heads=2: does not divide a projection of 3 rows"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(pack: Pack, rows: list[int], tp: int, message: str) -> None:
    with pytest.raises(LoraError, match=message):
        pack.resolve(ModelDims({"num_key_value_heads": 2}), rows, tp)
