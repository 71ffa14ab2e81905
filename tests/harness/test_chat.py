"""Prompts to token ids and back, with a real tokenizer saved in a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lora_harness.chat import (
    decode_completion,
    encode_prompt,
    load_chat_tokenizer,
    prompt_text,
    stop_token_ids,
)
from lora_harness.config import PromptSection
from lora_plugins_sdk.errors import LoraError

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = PromptSection()
CHAT = PromptSection(chat_template=True, system_prompt="be brief", template="Q: {prompt}?")


def save_tokenizer(directory: Path, *, eos: bool = True, template: str | None = None, bos: bool = False) -> Path:
    """A character-level tokenizer whose roles are single tokens."""
    special = ["<bos>", "<eos>", "<eot>", "<system>", "<user>", "<assistant>"]
    characters = [chr(code) for code in range(32, 127)]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *characters])}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    names: dict[str, Any] = {"bos_token": "<bos>"} | ({"eos_token": "<eos>"} if eos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=special[2:], **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def test_plain_prompt_gets_the_template_and_what_the_tokenizer_adds(tmp_path):
    section = PromptSection(template="{prompt} = ")
    tokenizer = load_chat_tokenizer(save_tokenizer(tmp_path, bos=True), section)
    ids = encode_prompt("2+2 {x}", section, tokenizer)
    assert prompt_text("2+2 {x}", section, tokenizer) == "2+2 {x} = "
    assert tokenizer.decode(ids) == "<bos>2+2 {x} = "


def test_chat_prompt_has_roles_and_no_second_bos(tmp_path):
    tokenizer = load_chat_tokenizer(save_tokenizer(tmp_path, template=TEMPLATE, bos=True), CHAT)
    assert prompt_text("why", CHAT, tokenizer) == "<system>be brief<user>Q: why?<assistant>"
    ids = encode_prompt("why", CHAT, tokenizer)
    assert tokenizer.decode(ids) == "<system>be brief<user>Q: why?<assistant>"
    assert ids.count(tokenizer.convert_tokens_to_ids("<user>")) == 1


def test_completion_text_is_without_special_tokens(tmp_path):
    tokenizer = load_chat_tokenizer(save_tokenizer(tmp_path), PLAIN)
    ids = tokenizer.convert_tokens_to_ids(["4", " ", ",", "2", "<eot>", "<eos>"])
    assert decode_completion(ids, tokenizer) == "4 ,2"


def test_stop_tokens_are_the_tokenizers_and_the_generation_configs(tmp_path):
    tokenizer = load_chat_tokenizer(save_tokenizer(tmp_path), PLAIN)
    assert stop_token_ids(tmp_path, tokenizer) == {1}
    for declared, expected in ((2, {1, 2}), ([2, 1], {1, 2}), (None, {1})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert stop_token_ids(tmp_path, tokenizer) == expected


@pytest.mark.parametrize(
    ("options", "section", "said"),
    [
        ({"eos": False}, PLAIN, "names no end-of-sequence token.*set eos_token"),
        ({}, CHAT, r"task\.chat_template: the tokenizer in .* has no chat template"),
    ],
)
def test_tokenizers_that_do_not_fit(tmp_path, options, section, said):
    save_tokenizer(tmp_path, **options)
    with pytest.raises(LoraError, match=said):
        load_chat_tokenizer(tmp_path, section)


def test_missing_tokenizer_files(tmp_path):
    with pytest.raises(LoraError, match="has no tokenizer"):
        load_chat_tokenizer(tmp_path, PLAIN)


def test_a_prompt_without_tokens(tmp_path):
    tokenizer = load_chat_tokenizer(save_tokenizer(tmp_path), PLAIN)
    with pytest.raises(LoraError, match=r"has no tokens -> put some text into task\.template"):
        encode_prompt("", PLAIN, tokenizer)
