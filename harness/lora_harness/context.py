"""Whether prompts and completions fit the model's context, found out before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from lora_harness.config import TrainConfig
from lora_harness.engines.model_files import context_length
from lora_harness.prompts import PromptEncoder
from lora_harness.tasks import Example
from lora_plugins_sdk.errors import LoraError


def refuse_beyond_context(config: TrainConfig, encoder: PromptEncoder, examples: Sequence[Example]) -> None:
    """Check the longest of some prompts together with the longest completion.

    Args:
        config: gives the model and `rollout.max_new_tokens`.
        encoder: turns prompts into token ids.
        examples: at least one.

    Raises:
        LoraError: together they need more positions than the model has.
    """
    context, drawn = context_length(config.model.path), config.rollout.max_new_tokens
    has = f"the context of {config.model.path} (max_position_embeddings) has {context}"
    if drawn >= context:
        raise LoraError(
            f"rollout.max_new_tokens = {drawn}",
            reason=f"leaves no room for a prompt: {has}",
            cure="lower it, or use a model with a longer context",
        )
    lengths = [len(encoder.encode(one)) for one in examples]
    longest = max(lengths)
    if longest + drawn > context:
        raise LoraError(
            f"rollout.max_new_tokens = {drawn}",
            reason=f"a prompt of {longest} tokens ({examples[lengths.index(longest)].prompt[:60]!r}) needs "
            f"{longest + drawn} positions then, {has}",
            cure=f"use {context - longest} or less" if longest < context else "shorten the task's prompts",
        )
