"""From an example's prompt to token ids, and from drawn tokens back to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_harness.config.tasks import PromptSection
from lora_plugins_sdk.errors import LoraError


def load_chat_tokenizer(model_dir: Path, section: PromptSection) -> Any:
    """The tokenizer of a local HF directory, fit for the task's kind of prompt.

    Raises:
        LoraError: no tokenizer files, no end-of-sequence token, or no chat template where the task asks for
            one.
    """
    from lora_harness.engines.model_files import load_hf_tokenizer

    tokenizer = load_hf_tokenizer(model_dir)
    if tokenizer.eos_token_id is None:
        raise LoraError(
            f"tokenizer in {model_dir}",
            reason="names no end-of-sequence token, so no completion could end before max_new_tokens",
            cure="set eos_token in its tokenizer_config.json",
        )
    if section.chat_template and not tokenizer.chat_template:
        raise LoraError(
            "task.chat_template",
            reason=f"the tokenizer in {model_dir} has no chat template",
            cure="set it to false and use task.template, or use an instruction-tuned model's directory",
        )
    return tokenizer


def prompt_text(prompt: str, section: PromptSection, tokenizer: Any) -> str:
    """The text put before the model: ``task.template`` around the prompt, then the chat template when asked for."""
    text = section.template.replace("{prompt}", prompt)
    if not section.chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    if section.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": section.system_prompt})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def encode_prompt(prompt: str, section: PromptSection, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of `prompt_text`.

    A chat template writes its special tokens itself; otherwise the tokenizer adds what it adds to any text,
    e.g. BOS.

    Raises:
        LoraError: the prompt has no token.
    """
    text = prompt_text(prompt, section, tokenizer)
    ids = tokenizer(text, add_special_tokens=not section.chat_template)["input_ids"]
    if not ids:
        raise LoraError(f"prompt {prompt!r}", reason="has no tokens", cure="put some text into task.template")
    return tuple(ids)


def decode_completion(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Text of drawn tokens without special tokens, e.g. without the end-of-sequence token."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_token_ids(model_dir: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's end of sequence, and those that config.json and
    generation_config.json declare.

    Chat models often list two, e.g. end of turn and end of text. Serving engines stop at all of these.
    """
    ids = {int(tokenizer.eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        path = model_dir / name
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for part in (held, held.get("text_config") or {}):
            declared = part.get("eos_token_id")
            if declared is not None:
                ids.update([declared] if isinstance(declared, int) else declared)
    return frozenset(ids)
