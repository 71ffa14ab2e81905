"""What the trainer asks of a rollout engine, and the data that goes to and fro. No torch at import."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What an engine can serve. What it cannot serve must not be trained.

    Args:
        name: the engine's name in the configuration.
        mode: how the policy reaches it: "adapter" means the base once and then versioned adapters, "merge" full weights
            with the adapter folded in.
        servable_projections: HF names of the projections it serves, or None for every one.
        pinned_projections: of those that it does not serve, the ones that a run holds at zero rather than refuse.
        max_rank: the largest rank it accepts, or None for any.
    """

    name: str
    mode: Literal["adapter", "merge"]
    servable_projections: frozenset[str] | None = None
    pinned_projections: frozenset[str] = frozenset()
    max_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw tokens.

    Args:
        max_new_tokens: the most tokens to draw, at least 1.
        temperature: divides the logits; 0 means greedy.
        stop_token_ids: a drawn token of this set ends the completion, and is its last token.

    Raises:
        LoraError: a value out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise LoraError("max_new_tokens", reason=f"{self.max_new_tokens} draws nothing", cure="use 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise LoraError(
                "temperature",
                reason=f"{self.temperature} is not a finite number >= 0",
                cure="use a positive temperature, or 0 for greedy decoding",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt to complete.

    Args:
        prompt_ids: token ids of the prompt, at least one.
        sampling: how to draw.
        seed: 0 <= seed < 2**64. Together with the position of a token it decides every random number of this
            request, so the completion depends neither on the other requests of a batch nor on which rank
            serves it.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine drew for one request.

    Args:
        token_ids: drawn tokens, the stop token included when one was drawn.
        logprobs: per token, the natural-log probability that the drawn token had in the distribution it was
            drawn from: after division of the logits by the temperature. Greedy completions report the
            distribution at temperature 1.
        finish_reason: "stop" when the last token is a stop token, else "length".
        adapter_version: the adapter that made it; 0 is the base without an adapter.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    adapter_version: int


@runtime_checkable
class RolloutEngine(Protocol):
    """Serves the base model with the newest adapter, the policy. One caller at a time."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can serve."""
        ...

    @property
    def adapter_version(self) -> int:
        """Version of the adapter that answers now; 0 is the base."""
        ...

    def publish(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """Make the base with this adapter the policy that answers from now on; all of it or, on error, nothing.

        Where several ranks share engines, every rank calls it, and all hear what became of it.

        Args:
            version: stamp of this policy, larger than every version before.
            tensors: what `adapter_model.safetensors` of a PEFT directory holds, by its names.
            config: what `adapter_config.json` of a PEFT directory holds.

        Returns:
            Bytes of tensor data sent; 0 when the engine already served an equal policy and kept its version.

        Raises:
            LoraError: stale version; missing, unexpected, misshapen or non-finite tensor; config that the engine
                refuses; an engine that fails.
        """
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Complete every request, in the order given.

        Where several ranks share engines, every rank calls it, if only with no request, and all hear what became of it.

        Raises:
            LoraError: an empty prompt, a token id outside the vocabulary, more tokens than the context holds, or an
                engine that fails.
        """
        ...

    def close(self) -> None:
        """Free the model. The engine cannot be used afterwards."""
        ...
