"""The local engine: rollouts in this process, from a HF model that receives the adapter through PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_harness.engines.base import Completion, EngineCapabilities, GenerationRequest
from lora_harness.engines.decode import complete
from lora_harness.engines.model_files import PLAIN, HfTraits, load_hf_model
from lora_harness.engines.peft_slot import PeftSlot
from lora_harness.engines.requests import check_requests
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_files import PeftAdapter
from lora_plugins_sdk.peft_parameters import to_parameters


class LocalEngine:
    """A `RolloutEngine` on transformers and PEFT, without a server.

    The policy arrives as PEFT tensors on every step, so an export that PEFT would misread shows as a
    log-probability gap.

    Args:
        model_dir: HF directory of the base (config.json, safetensors).
        traits: what transformers and PEFT must be told of the model.
        max_batch_size: the most requests decoded together; bounds the KV cache.
        device: torch device of the model.
        dtype: dtype of the base weights and activations.

    Raises:
        LoraError: files missing, or a batch size below 1.
    """

    capabilities = EngineCapabilities(name="local", mode="adapter")

    def __init__(
        self,
        model_dir: Path,
        *,
        traits: HfTraits = PLAIN,
        max_batch_size: int = 128,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if max_batch_size < 1:
            raise LoraError("max_batch_size", reason=f"{max_batch_size} serves nothing", cure="use 1 or more")
        base = load_hf_model(Path(model_dir), device=device, dtype=dtype)
        text_config = base.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        self._context: int = text_config.max_position_embeddings
        self._traits = traits
        self._max_batch_size = max_batch_size
        self._slot: PeftSlot | None = PeftSlot(base)
        self._version = 0

    @property
    def adapter_version(self) -> int:
        """See `RolloutEngine.adapter_version`."""
        return self._version

    def publish(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """See `RolloutEngine.publish`."""
        if version <= self._version:
            raise LoraError(
                f"adapter version {version}",
                reason=f"version {self._version} is loaded already",
                cure="count versions up from 1",
            )
        readable = to_parameters(PeftAdapter(tensors=tensors, config=config), self._traits.parameters)
        self._open_slot().fill(readable.tensors, readable.config)
        self._version = version
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See `RolloutEngine.generate`. Prompts of like length are decoded together, to pad little or not at all."""
        model = self._open_slot().model
        check_requests(requests, vocab_size=self._vocab_size, context=self._context)
        return complete(
            model,
            requests,
            max_batch_size=self._max_batch_size,
            adapter_version=self._version,
            left_padding=self._traits.left_padding,
        )

    def close(self) -> None:
        """See `RolloutEngine.close`. Safe to call twice."""
        self._slot = None

    def _open_slot(self) -> PeftSlot:
        if self._slot is None:
            raise LoraError("local engine", reason="it was closed", cure="open a new engine")
        return self._slot
