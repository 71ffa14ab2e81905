"""Prompts and completions that the model's context cannot hold are refused before a run writes anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_tiny_qwen3

from lora_harness.config import TrainConfig, parse_config
from lora_harness.context import refuse_beyond_context
from lora_harness.prompts import PromptEncoder
from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer
from lora_harness.tasks import Example
from lora_harness.train import run_training
from lora_plugins_sdk.errors import LoraError

CONTEXT = 64  # of the tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(directory)
    return directory


def config_of(model: Path, output: Path, max_new_tokens: int) -> TrainConfig:
    return parse_config(
        {
            "steps": 1,
            "output": str(output),
            "model": {"path": str(model)},
            "task": {"kind": "function", "prompts": "toy_rewards:prompts", "reward": "toy_rewards:reward"},
            "rollout": {"max_new_tokens": max_new_tokens},
            "eval": {"count": 2},
        }
    )


def test_the_longest_prompt_and_completion_just_fit_or_are_refused(model, tmp_path):
    examples = [Example(prompt="1+"), Example(prompt="123+")]
    longest = len(PromptEncoder(model, config_of(model, tmp_path, 1).task).encode(examples[1]))
    for drawn in (CONTEXT - longest, CONTEXT - longest + 1, CONTEXT):
        config = config_of(model, tmp_path, drawn)
        encoder = PromptEncoder(model, config.task)
        if drawn == CONTEXT - longest:
            refuse_beyond_context(config, encoder, examples)
            continue
        with pytest.raises(LoraError, match=f"rollout.max_new_tokens = {drawn}.*has {CONTEXT}") as caught:
            refuse_beyond_context(config, encoder, examples)
        cure = "lower it" if drawn == CONTEXT else f"use {CONTEXT - longest} or less"
        assert cure in str(caught.value)


def test_a_prompt_that_fills_the_context_is_shown(model, tmp_path):
    config = config_of(model, tmp_path, 1)
    with pytest.raises(LoraError, match=r"'1\+1\+.*shorten the task's prompts"):
        refuse_beyond_context(config, PromptEncoder(model, config.task), [Example(prompt="1+" * CONTEXT)])


def test_a_run_beyond_the_context_leaves_no_output(model, tmp_path):
    output = tmp_path / "run"
    with pytest.raises(LoraError, match=r"a prompt of \d+ tokens"):
        run_training(config_of(model, output, CONTEXT - 1))
    assert not output.exists()
