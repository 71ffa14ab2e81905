"""One tokenizer and one task's prompt options: examples to token ids, drawn tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_harness.chat import decode_completion, encode_prompt, load_chat_tokenizer, stop_token_ids
from lora_harness.config.tasks import PromptSection
from lora_harness.tasks import Example


class PromptEncoder:
    """What rollouts need of a tokenizer.

    Args:
        model_dir: HF directory with tokenizer files.
        section: the task's prompt options.

    Raises:
        LoraError: no tokenizer, or not one that fits the options.
    """

    def __init__(self, model_dir: Path, section: PromptSection) -> None:
        self._section = section
        self._tokenizer: Any = load_chat_tokenizer(model_dir, section)
        self.stop_ids = stop_token_ids(model_dir, self._tokenizer)

    @property
    def pad_id(self) -> int:
        """A token for positions that hold nothing."""
        pad = self._tokenizer.pad_token_id
        return int(self._tokenizer.eos_token_id if pad is None else pad)

    def encode(self, example: Example) -> tuple[int, ...]:
        """Token ids of an example's prompt, at least one."""
        return encode_prompt(example.prompt, self._section, self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of drawn tokens, special tokens left out."""
        return decode_completion(token_ids, self._tokenizer)

    def decode_token(self, token_id: int) -> str:
        """Text of one token, also of a special one."""
        return self._tokenizer.decode([token_id])
