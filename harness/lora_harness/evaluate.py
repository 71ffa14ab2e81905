"""Held-out reward of a base or of an adapter on disk, read by transformers and PEFT: no trainer, no megatron-core."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lora_harness.config import TrainConfig
from lora_harness.engines import GenerationRequest, SamplingParams
from lora_harness.engines.decode import complete
from lora_harness.engines.model_files import hf_traits, load_hf_model
from lora_harness.engines.peft_slot import adapter_state, check_fit, lora_config, without_false_alarms
from lora_harness.prompts import PromptEncoder
from lora_harness.rollouts import request_seed
from lora_harness.tasks import build_task
from lora_plugins_sdk import LoraError, read_adapter, write_adapter
from lora_plugins_sdk.adapter_files import INDEX_FILE
from lora_plugins_sdk.adapter_meta import engine_problems
from lora_plugins_sdk.errors import raise_if_any
from lora_plugins_sdk.offline.adapter import in_hf_names
from lora_plugins_sdk.peft_parameters import to_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of one evaluation.

    Args:
        reward: mean reward over all completions.
        prompts: held-out prompts.
        samples: completions of each.
        temperature: 0 is greedy.
    """

    reward: float
    prompts: int
    samples: int
    temperature: float


def evaluate(config: TrainConfig, *, adapter: Path | None, temperature: float, samples: int) -> Evaluation:
    """Complete and score the config's held-out prompts.

    Args:
        config: names the base, the task, the number of prompts, the seed and the longest completion.
        adapter: PEFT directory, or None for the base alone.
        temperature: 0 is greedy.
        samples: completions of each prompt.

    Raises:
        LoraError: base, tokenizer, task or adapter cannot be used.
    """
    task = build_task(config.task)
    encoder = PromptEncoder(config.model.path, config.task)
    examples = list(task.prompts("eval", config.eval.count, config.seed))
    model = load_policy(config, adapter)
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens, temperature=temperature, stop_token_ids=encoder.stop_ids
    )
    places = [(prompt, sample) for prompt in range(len(examples)) for sample in range(samples)]
    requests = [
        GenerationRequest(
            prompt_ids=encoder.encode(examples[prompt]),
            sampling=sampling,
            seed=request_seed(config.seed, "evaluate", prompt, sample),
        )
        for prompt, sample in places
    ]
    completions = complete(
        model,
        requests,
        max_batch_size=config.rollout.max_batch_size,
        adapter_version=0 if adapter is None else 1,
        left_padding=hf_traits(config.model.path, config.model.plugin).left_padding,
    )
    rewards = [
        task.score(examples[prompt], encoder.decode(completion.token_ids))
        for (prompt, _), completion in zip(places, completions, strict=True)
    ]
    return Evaluation(
        reward=sum(rewards) / len(rewards), prompts=len(examples), samples=samples, temperature=temperature
    )


def load_policy(config: TrainConfig, adapter: Path | None) -> Any:
    """The base with the adapter that `adapter` holds, as a user of PEFT gets it.

    Raises:
        LoraError: base or adapter cannot be read, or the adapter does not fit the base.
    """
    if adapter is None:
        return _load_base(config)
    # A bad adapter is refused before the base, which may take minutes, is loaded.
    if (adapter / INDEX_FILE).exists():
        raise LoraError(
            str(adapter),
            reason="has its tensors in several files, and PEFT reads one",
            cure=f"write it into one first: lora-plugins export {adapter} --output DIR",
        )
    from peft import PeftModel

    given = read_adapter(adapter)
    raise_if_any("PEFT cannot read this adapter:", engine_problems(str(adapter), given.origin))
    # Factors of experts that the HF model keeps in one parameter; anything else is read from where it lies.
    named = in_hf_names(given, config.model.path, plugin=config.model.plugin)
    readable = to_parameters(named, hf_traits(config.model.path, config.model.plugin).parameters)
    lora_config(readable.config)
    base = _load_base(config)
    try:
        with tempfile.TemporaryDirectory() as folder, without_false_alarms():
            where = adapter if readable is given else write_adapter(readable, folder)
            model = PeftModel.from_pretrained(base, str(where)).eval()
    except (ValueError, RuntimeError, KeyError) as error:
        raise LoraError(
            str(adapter),
            reason=f"PEFT cannot put it on {config.model.path}: {error}",
            cure="use the base it was trained on",
        ) from error
    # PEFT only warns about tensors that it found no place for.
    check_fit(adapter_state(model), readable.tensors)
    return model


def _load_base(config: TrainConfig) -> Any:
    return load_hf_model(
        config.model.path,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=getattr(torch, config.model.dtype),
    )


def run_evaluation(config: TrainConfig, *, adapter: Path | None) -> Evaluation:
    """`evaluate` as the config's ``[eval]`` says, and print the result."""
    result = evaluate(config, adapter=adapter, temperature=config.eval.temperature, samples=config.eval.samples)
    drawn = "greedy" if result.temperature == 0 else f"{result.samples} samples at temperature {result.temperature:g}"
    what = f"adapter {adapter}" if adapter is not None else f"base {config.model.path}"
    Console(file=sys.stdout).print(
        f"held-out reward {result.reward:.3f} on {result.prompts} prompts ({drawn}): {what}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    return result
