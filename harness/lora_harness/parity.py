"""Trainer against engine: how far their log-probabilities of the same drawn tokens are apart, and when that is too far.

A gap shows whatever makes the policy that is trained another one than the policy that sampled: an export that the
engine misreads, a stale version, a wrong scale, kernels that round differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from lora_harness.prompts import PromptEncoder
    from lora_harness.rollouts import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """The drawn token on which trainer and engine differ most.

    Args:
        gap: absolute difference in nats; infinite when one of the two is not a number.
        row: row of the step's batch.
        column: position in the row, the one that predicts the token.
        trainer, engine: log-probability of the token.
    """

    gap: float
    row: int
    column: int
    trainer: float
    engine: float


def worst_token(trainer: Tensor, engine: Tensor, mask: Tensor, rows: Tensor) -> WorstToken | None:
    """The worst of some rows; None when they hold no drawn token.

    Args:
        trainer, engine: [batch, sequence] log-probabilities.
        mask: [batch, sequence] True where a token was drawn.
        rows: [batch] rows of the step's batch.
    """
    if not bool(mask.any()):
        return None
    gap = (trainer.detach() - engine).abs().nan_to_num(nan=math.inf)
    row, column = divmod(int(gap.masked_fill(~mask, -1.0).argmax()), gap.shape[1])
    return WorstToken(
        gap=gap[row, column].item(),
        row=int(rows[row]),
        column=column,
        trainer=trainer[row, column].item(),
        engine=engine[row, column].item(),
    )


def worst_of(tokens: Iterable[WorstToken | None]) -> WorstToken | None:
    """The worst of several; None when there is none."""
    return max((one for one in tokens if one is not None), key=lambda one: one.gap, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GapReport:
    """The gap of one step, its worst token named as a reader knows it.

    Args:
        step: counted from 0.
        mean, maximum: over all drawn tokens, in nats.
        token: id of the worst token.
        text: its text.
        position: its place in its completion, counted from 0.
        completion: the completion's place in the step, counted from 0.
        trainer, engine: its log-probability.
    """

    step: int
    mean: float
    maximum: float
    token: int
    text: str
    position: int
    completion: int
    trainer: float
    engine: float

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.1e}, max {self.maximum:.1e} at step {self.step + 1}: token {self.token} {self.text!r}, "
            f"number {self.position + 1} of completion {self.completion + 1}, trainer {self.trainer:.6f}, "
            f"engine {self.engine:.6f}"
        )

    def values(self) -> dict[str, float | int]:
        """Numbers for the step's row of metrics."""
        return {
            "token": self.token,
            "position": self.position,
            "completion": self.completion,
            "trainer": self.trainer,
            "engine": self.engine,
        }


def gap_report(
    worst: WorstToken, *, step: int, mean: float, rollouts: Sequence[Rollout], encoder: PromptEncoder
) -> GapReport:
    """Name a step's worst token.

    Args:
        worst: over all rows of the step.
        step: counted from 0.
        mean: mean gap of the step.
        rollouts: the step's completions in the order of the batch's rows.
        encoder: gives the token's text.
    """
    one = rollouts[worst.row]
    position = worst.column - (len(one.prompt_ids) - 1)
    token = one.completion.token_ids[position]
    return GapReport(
        step=step,
        mean=mean,
        maximum=worst.gap,
        token=token,
        text=encoder.decode_token(token),
        position=position,
        completion=worst.row,
        trainer=worst.trainer,
        engine=worst.engine,
    )


def refuse_gap(report: GapReport, limit: float | None) -> None:
    """End the run when the gap is above the limit; without one, never.

    Raises:
        LoraError: it is, or it is not a number; the worst token is named.
    """
    if limit is None or report.maximum <= limit:
        return
    raise LoraError(
        f"rollout.max_logprob_gap = {limit:g}",
        reason=f"trainer and engine differ by more: {report}",
        cure="look for what makes the engine's policy another one (docs/sglang.md has a table); raise the limit only "
        "if the dtype explains the gap",
    )
