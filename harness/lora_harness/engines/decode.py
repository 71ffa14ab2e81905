"""Batched decoding with a KV cache: left padding in, one token a row and step out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lora_harness.engines.base import Completion, FinishReason, GenerationRequest
from lora_harness.engines.sampling import draw_tokens, request_uniforms
from lora_plugins_sdk.errors import LoraError

# Copying the cache to drop rows costs about one step's reading of it, so wait until a share of the rows is
# done.
_COMPACT_SHARE = 0.25


class _Row:
    """One request while it is being decoded."""

    def __init__(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        self.request = request
        self.uniforms = request_uniforms(request.seed, sampling.max_new_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None

    def uniform(self) -> float:
        """The random number of the next token; a finished row waits for compaction and needs none."""
        return 0.0 if self.finish_reason else float(self.uniforms[len(self.tokens)])

    def take(self, token: int, logprob: float) -> None:
        if self.finish_reason:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.sampling.max_new_tokens:
            self.finish_reason = "length"


def complete(
    model: Any,
    requests: Sequence[GenerationRequest],
    *,
    max_batch_size: int,
    adapter_version: int,
    left_padding: bool = True,
) -> list[Completion]:
    """Complete `requests` in batches of prompts of like length, which pads little; answers in the order given.

    Args:
        model: HF causal language model in eval mode.
        requests: any number; valid ones, see `RolloutEngine.generate`.
        max_batch_size: the most requests decoded together.
        adapter_version: the stamp of the completions.
        left_padding: whether padding on the left changes nothing in this model; where it does, only prompts of one
            length are decoded together.
    """

    def length(index: int) -> int:
        return len(requests[index].prompt_ids)

    by_length = sorted(range(len(requests)), key=length)
    together = [by_length] if left_padding else [list(same) for _, same in groupby(by_length, key=length)]
    completions: dict[int, Completion] = {}
    for indices in (
        some[start : start + max_batch_size] for some in together for start in range(0, len(some), max_batch_size)
    ):
        batch = decode_batch(model, [requests[i] for i in indices], adapter_version=adapter_version)
        completions.update(zip(indices, batch, strict=True))
    return [completions[index] for index in range(len(requests))]


@torch.inference_mode()
def decode_batch(model: Any, requests: Sequence[GenerationRequest], *, adapter_version: int) -> list[Completion]:
    """Complete `requests` together.

    Args:
        model: HF causal language model in eval mode.
        requests: at least one; prompts are padded on the left to the longest.
        adapter_version: the stamp of the completions.

    Raises:
        LoraError: the model's probabilities are not finite.
    """
    from transformers import DynamicCache

    rows = [_Row(request) for request in requests]
    active = list(rows)
    device = model.device
    tokens, mask = _left_padded(requests, device)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    temperatures = torch.tensor([one.sampling.temperature for one in requests], dtype=torch.float64, device=device)
    cache = DynamicCache(config=model.config)
    cache_argument = {_cache_name(model): cache}
    while True:
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            **cache_argument,
            use_cache=True,
            logits_to_keep=1,
        )
        uniforms = torch.tensor([row.uniform() for row in active], dtype=torch.float64, device=device)
        drawn, logprobs = draw_tokens(output.logits[:, -1], temperatures, uniforms)
        if not bool(torch.isfinite(logprobs).all()):
            raise LoraError(
                f"adapter version {adapter_version}",
                reason="the model's token probabilities are not finite",
                cure="lower the learning rate, or check the base weights",
            )
        for row, token, logprob in zip(active, drawn.tolist(), logprobs.tolist(), strict=True):
            row.take(token, logprob)

        kept = [index for index, row in enumerate(active) if row.finish_reason is None]
        if not kept:
            return [_completion(row, adapter_version) for row in rows]
        tokens, positions = drawn[:, None], positions[:, -1:] + 1
        if len(active) - len(kept) >= _COMPACT_SHARE * len(active):
            index = torch.tensor(kept, device=device)
            active = [active[i] for i in kept]
            # Unlike batch_select_indices, it knows the states of linear attention.
            cache.reorder_cache(index)  # type: ignore[arg-type]
            tokens, positions, mask, temperatures = (t[index] for t in (tokens, positions, mask, temperatures))
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)


def _cache_name(model: Any) -> str:
    """What a model's forward calls the cache: transformers 5.24 renamed it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


def _left_padded(requests: Sequence[GenerationRequest], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both [rows, longest prompt]; padding is masked, so its id does not matter."""
    longest = max(len(one.prompt_ids) for one in requests)
    tokens = np.zeros((len(requests), longest), dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, one in enumerate(requests):
        tokens[row, longest - len(one.prompt_ids) :] = one.prompt_ids
        mask[row, longest - len(one.prompt_ids) :] = 1
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)


def _completion(row: _Row, adapter_version: int) -> Completion:
    assert row.finish_reason is not None
    return Completion(
        token_ids=tuple(row.tokens),
        # Rounded to fp32, the precision that trainers keep log-probabilities in.
        logprobs=tuple(np.asarray(row.logprobs, dtype=np.float32).tolist()),
        finish_reason=row.finish_reason,
        adapter_version=adapter_version,
    )
