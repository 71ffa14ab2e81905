"""A step's completions as padded tensors, and who trains on which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """All sequences of one training step, the same on every rank. N sequences of S positions.

    Position t holds the input token and everything about the token after it.

    Args:
        inputs: [N, S] token ids, padded on the right.
        targets: [N, S] the token that follows each input.
        mask: [N, S] True where the target is a drawn token, the ones that are trained.
        rollout_logprobs: [N, S] fp32, the engine's log-probability of each drawn token; 0 elsewhere.
        advantages: [N] fp32.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor

    @property
    def lengths(self) -> list[int]:
        """Trained tokens of every sequence."""
        return self.mask.sum(dim=1).tolist()


class DrawnSequence(NamedTuple):
    """Prompt, drawn tokens and the engine's log-probability of each drawn token."""

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]


def pack(
    sequences: Sequence[DrawnSequence], advantages: Tensor, *, pad_id: int, multiple: int, device: torch.device
) -> StepBatch:
    """Pad sequences to one length.

    Args:
        sequences: at least one, each with a prompt of at least one token.
        advantages: one a sequence.
        pad_id: input of positions that hold nothing; causal attention keeps it out of every trained position.
        multiple: S is a multiple of it (sequence parallelism needs the TP size).
        device: where the model lives.
    """
    longest = max(len(one.prompt) + len(one.completion) for one in sequences) - 1
    width = -(-longest // multiple) * multiple
    tokens = torch.full((len(sequences), width + 1), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    logprobs = torch.zeros(len(sequences), width)
    for row, one in enumerate(sequences):
        tokens[row, : len(one.prompt) + len(one.completion)] = torch.tensor([*one.prompt, *one.completion])
        drawn = slice(len(one.prompt) - 1, len(one.prompt) - 1 + len(one.completion))
        mask[row, drawn] = True
        logprobs[row, drawn] = torch.tensor(one.logprobs)
    return StepBatch(
        inputs=tokens[:, :-1].contiguous().to(device),
        targets=tokens[:, 1:].contiguous().to(device),
        mask=mask.to(device),
        rollout_logprobs=logprobs.to(device),
        advantages=advantages.float().to(device),
    )


class Microbatch(NamedTuple):
    """Rows of a step batch. Filler rows make microbatches equal in size, which pipelines need; they train nothing."""

    rows: Tensor
    filler: Tensor


def microbatches(rows: Sequence[int], *, rank: int, ranks: int, size: int) -> list[Microbatch]:
    """This data parallel rank's share of some rows, in microbatches.

    Every rank gets the same number of microbatches of the same size; what is missing is filled with copies of row 0.

    Args:
        rows: rows of the step batch that one optimizer update trains on.
        rank, ranks: index and number of data parallel ranks.
        size: rows in a microbatch.
    """
    share = -(-len(rows) // ranks)
    mine = list(rows[rank * share : (rank + 1) * share])
    size = min(size, share)
    count = -(-share // size)
    missing = count * size - len(mine)
    filler = torch.tensor([False] * len(mine) + [True] * missing)
    filled = torch.tensor(mine + [0] * missing)
    return [Microbatch(*pair) for pair in zip(filled.split(size), filler.split(size), strict=True)]
