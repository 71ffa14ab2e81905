"""Making the base: supervised learning, the window, and the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lora_harness.engines import GenerationRequest, SamplingParams
from lora_harness.engines.local import LocalEngine
from lora_harness.engines.model_files import load_hf_tokenizer
from lora_harness.engines.sglang.base_fit import refuse_other_layouts
from lora_harness.quickstart.arithmetic import prompts, reward
from lora_harness.quickstart.base_model import Base, make_base
from lora_harness.quickstart.model import model_config
from lora_harness.quickstart.recipe import BaseRecipe
from lora_harness.quickstart.tokenizer import build_tokenizer
from lora_harness.quickstart.warmup import accuracy, encode
from lora_harness.tasks import Example
from lora_plugins_sdk.errors import LoraError

# Small enough for a unit test: it ends at its first check, right in hardly any sample.
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
QUICK = BaseRecipe(
    model=model_config("qwen3") | SMALL, batch_size=16, target=0.0, check_every=2, max_steps=4, lr_warmup=1
)


def quick_base(path: Path, *, seed: int = 0, recipe: BaseRecipe = QUICK) -> Base:
    replaced = path.with_name("replaced")
    return make_base(path, seed=seed, recipe=recipe, replaced=replaced, say=lambda text: None)


def test_encoded_labels_hold_answer_and_end() -> None:
    tokenizer = build_tokenizer()
    ids, labels = encode(tokenizer, [Example(prompt="1+2=", answer="3"), Example(prompt="10+20=", answer="30")])
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    three, zero = tokenizer("30")["input_ids"]
    assert ids.shape == labels.shape == (2, 9)
    assert ids[0].tolist() == [*tokenizer("1+2=3")["input_ids"], eos, pad, pad, pad]
    assert labels[0].tolist() == [-100] * 4 + [three, eos] + [-100] * 3
    assert labels[1].tolist() == [-100] * 6 + [three, zero, eos]


def test_accuracy_is_what_the_engine_samples(tmp_path: Path) -> None:
    """The teacher-forced accuracy is the expectation of the reward, and its greedy form is greedy decoding."""
    base = quick_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base.path)
    tokenizer = load_hf_tokenizer(base.path)
    # Single digits without anything to add, so that even this untaught model is right now and then.
    examples = [Example(prompt="7=", answer=str(digit)) for digit in range(10)]
    exact = accuracy(model, *encode(tokenizer, examples))
    sampled = LocalEngine(base.path)
    count = 4000
    stop = frozenset([tokenizer.eos_token_id])
    sampling = SamplingParams(max_new_tokens=2, stop_token_ids=stop)
    prompt = tuple(tokenizer("7=")["input_ids"])
    done = sampled.generate([GenerationRequest(prompt_ids=prompt, sampling=sampling, seed=i) for i in range(count)])
    # Every completion "digit, end" is right for exactly one of the ten examples.
    right = np.array(
        [
            one.finish_reason == "stop" and tokenizer.decode(one.token_ids[:1]).isdigit() and len(one.token_ids) == 2
            for one in done
        ],
        dtype=float,
    )
    share, want = right.mean(), 10 * exact.sampled
    assert want > 0.01
    assert abs(share - want) < 5 * (want * (1 - want) / count) ** 0.5


@pytest.mark.parametrize(("model", "model_type"), [("qwen3", "qwen3"), ("inkling", "inkling_mm_model")])
def test_base_is_an_ordinary_directory(tmp_path: Path, model: str, model_type: str) -> None:
    """As its publishers write it, which is what every engine reads."""
    base = quick_base(tmp_path / "base", recipe=replace(QUICK, model=model_config(model) | SMALL))
    assert not base.reused
    config = json.loads((base.path / "config.json").read_text())
    assert config["model_type"] == model_type
    refuse_other_layouts(base.path, config)
    engine = LocalEngine(base.path)
    tokenizer = load_hf_tokenizer(base.path)
    example = prompts("eval", 1, 0)[0]
    asked = GenerationRequest(
        prompt_ids=tuple(tokenizer(example.prompt)["input_ids"]), sampling=SamplingParams(max_new_tokens=5)
    )
    text = tokenizer.decode(engine.generate([asked])[0].token_ids, skip_special_tokens=True)
    assert reward(example, text) in (0.0, 1.0)


def test_second_run_reuses_the_base(tmp_path: Path) -> None:
    first = quick_base(tmp_path / "base")
    weights = (first.path / "model.safetensors").read_bytes()
    second = quick_base(tmp_path / "base")
    assert second == replace(first, reused=True)
    assert (second.path / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("change", [{"seed": 1}, {"recipe": replace(QUICK, forget=0.5)}])
def test_another_seed_or_recipe_makes_another_base(tmp_path: Path, change: dict) -> None:
    first = quick_base(tmp_path / "base")
    weights = (first.path / "model.safetensors").read_bytes()
    assert not quick_base(tmp_path / "base", **change).reused
    assert (first.path / "model.safetensors").read_bytes() != weights
    assert (tmp_path / "replaced" / "model.safetensors").read_bytes() == weights


def test_same_seed_makes_the_same_base_whatever_the_global_generator(tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        torch.manual_seed(len(weights))
        before = torch.get_rng_state()
        weights.append((quick_base(tmp_path / name).path / "model.safetensors").read_bytes())
        assert torch.equal(torch.get_rng_state(), before)
    assert weights[0] == weights[1]


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "mine.txt").write_text("keep")
    with pytest.raises(LoraError, match="no quickstart base"):
        quick_base(tmp_path / "base")
    assert (tmp_path / "base" / "mine.txt").read_text() == "keep"


def test_warm_up_that_never_arrives(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="did not reach"):
        quick_base(tmp_path / "base", recipe=replace(QUICK, target=0.99))
    assert list(tmp_path.iterdir()) == []
