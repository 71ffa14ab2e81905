"""Whether an engine can serve a request, found out before it is asked to."""

from __future__ import annotations

from collections.abc import Sequence

from lora_harness.engines.base import GenerationRequest
from lora_plugins_sdk.errors import LoraError


def check_requests(requests: Sequence[GenerationRequest], *, vocab_size: int, context: int) -> None:
    """Refuse the first request that a model cannot serve.

    Args:
        requests: any number.
        vocab_size: tokens that the model has.
        context: positions that it has, for prompt and completion together.

    Raises:
        LoraError: an empty prompt, a token id outside the vocabulary, too many tokens, or a seed out of range.
    """
    for index, request in enumerate(requests):
        _check_request(f"request {index}", request, vocab_size, context)


def _check_request(subject: str, request: GenerationRequest, vocab_size: int, context: int) -> None:
    prompt = request.prompt_ids
    if not prompt:
        raise LoraError(subject, reason="the prompt has no tokens", cure="give at least one token, such as BOS")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise LoraError(
            subject,
            reason=f"a token id is outside the vocabulary of {vocab_size}",
            cure="use the tokenizer of this model directory",
        )
    needed = len(prompt) + request.sampling.max_new_tokens
    if needed > context:
        raise LoraError(
            subject,
            reason=f"{len(prompt)} prompt tokens and {request.sampling.max_new_tokens} new ones need "
            f"{needed} positions, the context (max_position_embeddings) has {context}",
            cure="shorten the prompt or lower max_new_tokens",
        )
    if not 0 <= request.seed < 2**64:
        raise LoraError(subject, reason=f"seed {request.seed} is out of range", cure="use 0 <= seed < 2**64")
