"""Run facts: how many ranks share the work, in which way. No torch, no process groups."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lora_plugins_sdk.errors import LoraError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Sizes of the parallel dimensions of one training run.

    Args:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        dp: data parallel size.
        cp: context parallel size.
        sequence_parallel: whether activations between TP regions are split along the sequence.

    Raises:
        LoraError: a size below 1, or sequence parallelism without tensor parallelism.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "sequence_parallel" and (not isinstance(value, int) or value < 1):
                raise LoraError(
                    one.name,
                    reason=f"parallel size {value!r} is not a positive integer",
                    cure="use 1 or more",
                )
        if self.sequence_parallel and self.tp == 1:
            raise LoraError(
                "sequence_parallel",
                reason="has no effect with tensor parallel size 1",
                cure="drop it or set the tensor parallel size to 2 or more",
            )
