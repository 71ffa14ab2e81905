"""Packing completions and dealing them to ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_harness.batch import DrawnSequence, microbatches, pack

CPU = torch.device("cpu")


def test_positions_line_up_with_the_token_that_follows() -> None:
    sequences = [DrawnSequence([5, 6, 7], [8, 9], [-0.1, -0.2]), DrawnSequence([1], [2, 3, 4], [-0.3, -0.4, -0.5])]
    batch = pack(sequences, torch.tensor([1.0, -1.0]), pad_id=0, multiple=4, device=CPU)
    assert batch.inputs.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.targets.tolist() == [[6, 7, 8, 9], [2, 3, 4, 0]]
    assert batch.mask.tolist() == [[False, False, True, True], [True, True, True, False]]
    for row, one in enumerate(sequences):
        assert batch.targets[row][batch.mask[row]].tolist() == list(one.completion)
        assert torch.equal(batch.rollout_logprobs[row][batch.mask[row]], torch.tensor(one.logprobs))
    assert batch.lengths == [2, 3]


def test_width_is_padded_to_a_multiple() -> None:
    batch = pack([DrawnSequence([1, 2], [3], [-1.0])], torch.zeros(1), pad_id=7, multiple=4, device=CPU)
    assert batch.inputs.tolist() == [[1, 2, 3, 7]]
    assert batch.lengths == [1]


def test_an_empty_completion_trains_nothing() -> None:
    sequences = [DrawnSequence([1, 2, 3], [], []), DrawnSequence([1], [2], [-1.0])]
    batch = pack(sequences, torch.zeros(2), pad_id=0, multiple=1, device=CPU)
    assert batch.lengths == [0, 1]


@given(count=st.integers(1, 40), ranks=st.integers(1, 5), size=st.integers(1, 9), start=st.integers(0, 3))
def test_every_row_is_trained_once_and_all_ranks_run_the_same_shape(
    count: int, ranks: int, size: int, start: int
) -> None:
    rows = list(range(start, start + count))
    shares = [microbatches(rows, rank=rank, ranks=ranks, size=size) for rank in range(ranks)]
    trained = [row for share in shares for micro in share for row in micro.rows[~micro.filler].tolist()]
    assert sorted(trained) == rows
    assert len({len(share) for share in shares}) == 1
    assert len({len(micro.rows) for share in shares for micro in share}) == 1
    assert all(len(micro.rows) <= size for share in shares for micro in share)
