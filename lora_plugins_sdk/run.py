"""Run facts: how many ranks share the work, in which way. No torch, no process groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from lora_plugins_sdk.errors import Diagnostic, LoraError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Sizes of the parallel dimensions of one training run, and how they lay it out.

    Routed experts are laid out apart from the rest of the model: the same ranks of a pipeline stage, tp * cp * dp of
    them, are then etp * ep * expert_dp.

    Args:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        dp: data parallel size.
        cp: context parallel size.
        ep: expert parallel size: ranks that the routed experts are spread over.
        etp: tensor parallel size within one expert; the tensor parallel size when None, as in megatron-core.
        sequence_parallel: whether activations between TP regions are split along the sequence.
        make_vocab_size_divisible_by: where the model pads its vocabulary further than to a multiple of `tp`,
            Megatron-LM's number of that name: rows are rounded up to a multiple of it times `tp`.

    Raises:
        LoraError: a size below 1, expert sizes that do not divide a stage's ranks, or sequence parallelism without
            tensor parallelism.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = None  # type: ignore[assignment]
    sequence_parallel: bool = False
    make_vocab_size_divisible_by: int = 1

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "sequence_parallel" and (type(value) is not int or value < 1):
                raise LoraError(
                    one.name,
                    reason=f"{value!r} is not a positive integer",
                    cure="use 1 or more",
                )
        if self.sequence_parallel and self.tp == 1:
            raise LoraError(
                "sequence_parallel",
                reason="has no effect with tensor parallel size 1",
                cure="drop it or set the tensor parallel size to 2 or more",
            )
        if self.stage_size % (self.ep * self.etp):
            raise LoraError(
                f"expert parallel size {self.ep} x expert tensor parallel size {self.etp}",
                reason=f"does not divide the {self.stage_size} ranks of a pipeline stage "
                f"(tp {self.tp} x cp {self.cp} x dp {self.dp})",
                cure="lower ep or etp, or raise the data parallel size",
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.stage_size * self.pp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.stage_size // (self.ep * self.etp)

    @property
    def experts_apart(self) -> bool:
        """Whether expert parameters are replicated over other ranks than the rest of the model, so that their gradients
        need another data-parallel reduction.
        """
        return self.ep > 1 or self.etp != self.tp


def needless_expert_sizes(facts: RunFacts) -> Iterator[Diagnostic]:
    """Parallel sizes that only routed experts need, for a model that has none."""
    asked = {
        f"expert parallel size {facts.ep}": facts.ep > 1,
        f"expert tensor parallel size {facts.etp}": facts.etp != facts.tp,
    }
    for subject, given in asked.items():
        if given:
            yield needless_for_experts(subject)


def needless_for_experts(subject: str) -> Diagnostic:
    """An option of routed experts, for a model that has none."""
    return Diagnostic(subject=subject, reason="has no effect on a model without routed experts", cure="leave it out")
