"""What is asked of one SGLang engine, whether it runs in this process or behind HTTP. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lora_harness.engines.base import SamplingParams
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangRequest:
    """One completion to draw.

    Args:
        rid: request id, unique among the requests that are alive on the engine.
        prompt_ids: token ids of the prompt, at least one.
        sampling: how to draw.
        seed: 0 <= seed < 2**64.
        adapter: name of a loaded adapter; None is the base.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangCompletion:
    """What the engine drew.

    Args:
        token_ids: drawn tokens, the stop token included when one was drawn.
        logprobs: natural-log probability of each in the distribution it was drawn from (after temperature).
        finish_reason: "abort" when the request was ended from outside; the tokens drawn until then are given.
        weight_version: the engine's stamp of its full weights while it served the request, None when it has none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: str | None = None


class SglangClient(Protocol):
    """One SGLang engine. Calls may come from several threads; each call blocks until it is answered.

    Every method raises `LoraError` when the engine refuses or does not answer in time, with the engine's own words as
    the reason; after the engine died the error carries the end of its log.
    """

    @property
    def name(self) -> str:
        """How messages call this engine, for example its URL."""
        ...

    def generate(self, requests: Sequence[SglangRequest]) -> list[SglangCompletion]:
        """Complete all requests, in the order given; the engine batches them."""
        ...

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], checksums: Mapping[str, str]
    ) -> None:
        """Load an adapter from memory under a name that is not in use.

        Args:
            name: the adapter's name in requests.
            tensors: under the names that SGLang knows.
            config: `adapter_config.json`'s content, target modules in SGLang's normalised names.
            checksums: tensor name -> sha256 (hex) of its raw bytes; the engine compares what it received.
        """
        ...

    def load_adapter_directory(self, name: str, directory: Path) -> None:
        """Load an adapter from a PEFT directory that the engine can read."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; waits for the requests that use it."""
        ...

    def loaded_adapters(self) -> frozenset[str]:
        """Names of the adapters that the engine holds now, asked of the engine itself."""
        ...

    def begin_weight_update(self) -> None:
        """Open a full-weight update; the engine serves no request until it is closed."""
        ...

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Push one bucket of full weights under their HF names."""
        ...

    def end_weight_update(self, version: str) -> None:
        """Close the update, stamp the weights and forget cached prefixes."""
        ...

    def weight_checksums(self) -> Mapping[str, str]:
        """Checksum of every weight that the engine holds, by the engine's own names."""
        ...

    def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them; their callers get what was drawn."""
        ...

    def healthy(self) -> bool:
        """Whether the engine answers within a few seconds. Never raises."""
        ...

    def death(self) -> LoraError | None:
        """What the engine died of, with the end of its log; None while it lives, or where this client cannot know."""
        ...

    def close(self) -> None:
        """Stop the engine if this client started it. Safe to call twice."""
        ...
