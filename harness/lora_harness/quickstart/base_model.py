"""The quickstart's base: a small model that imitates careless additions, as an ordinary HF directory."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lora_harness.quickstart.arithmetic import careless_answer, problems, prompts
from lora_harness.quickstart.recipe import BaseRecipe
from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer
from lora_harness.quickstart.warmup import Accuracy, accuracy, encode, training_step
from lora_harness.tasks import Example
from lora_plugins_sdk import BaseCheckpoint, SelectedPlugin, load_plugin, read_hf_config
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.staging import remove, writable

_STAMP = "quickstart_base.json"
# Raise when the way the base is made changes, so that no cached one of before is taken for it.
_VERSION = 2
_VALIDATION_COUNT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A base model on disk.

    Args:
        path: HF directory.
        reused: whether an earlier run had made it.
        accuracy: on validation problems, which neither the warm-up nor the evaluation uses.
    """

    path: Path
    reused: bool
    accuracy: Accuracy


def make_base(path: Path, *, seed: int, recipe: BaseRecipe, replaced: Path, say: Callable[[str], None]) -> Base:
    """The base in `path`: the one that is there if it was made with this seed and recipe, else a new one.

    Args:
        path: HF directory to write.
        seed: initial weights and order of the demonstrations.
        recipe: how to make it.
        replaced: where an old base is moved when a new one replaces it; must not exist.
        say: told about the progress, a line at a time.

    Raises:
        LoraError: `path` holds something else than a quickstart base or cannot be written, or the warm-up did not reach
            its target.
    """
    fingerprint = _fingerprint(seed, recipe)
    stamp = path / _STAMP
    if path.exists() and not stamp.is_file():
        raise LoraError(
            str(path), reason="exists and is no quickstart base", cure="choose another --output, or move it away"
        )
    if stamp.is_file():
        found = json.loads(stamp.read_text(encoding="utf-8"))
        if found.get("fingerprint") == fingerprint:
            return Base(path=path, reused=True, accuracy=Accuracy(**found["accuracy"]))
    tokenizer = build_tokenizer()
    model = _fresh_model(recipe, tokenizer, seed)
    with _one_thread():
        reached = _warm_up(model, tokenizer, seed, recipe, say)
    # Written beside it and moved in one piece: an interrupted run leaves no half of a base behind.
    unfinished = path.with_name(path.name + ".unfinished")
    document = {"fingerprint": fingerprint, "seed": seed, "recipe": asdict(recipe), "accuracy": asdict(reached)}
    with writable(path):
        remove(unfinished)
        model.save_pretrained(unfinished)
        _publish(unfinished, load_plugin(str(recipe.model["model_type"])))
        tokenizer.save_pretrained(unfinished)
        (unfinished / _STAMP).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
    return Base(path=path, reused=False, accuracy=reached)


def _publish(directory: Path, plugin: SelectedPlugin) -> None:
    """Make a directory that transformers wrote one as the model's publishers write it, for every engine to read."""
    weights = directory / "model.safetensors"
    published = plugin.published_base(BaseCheckpoint(config=read_hf_config(directory), tensors=load_file(weights)))
    tensors = {name: tensor.contiguous() for name, tensor in published.tensors.items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(published.config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and on a busy machine threads wait for each other.

    Sums do not depend on the number of cores then, so a seed makes the same base on each machine of a kind.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fingerprint(seed: int, recipe: BaseRecipe) -> str:
    document = json.dumps([_VERSION, seed, asdict(recipe), VOCABULARY], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def _fresh_model(recipe: BaseRecipe, tokenizer: Any, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(recipe.model)
    config = AutoConfig.for_model(
        options.pop("model_type"),
        **options,
        vocab_size=len(VOCABULARY),
        initializer_range=0.5 * recipe.model["hidden_size"] ** -0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data.mul_(recipe.head_scale)
    return model


def _warm_up(model: Any, tokenizer: Any, seed: int, recipe: BaseRecipe, say: Callable[[str], None]) -> Accuracy:
    """Supervised steps until the model is right as often as the recipe asks for."""
    validation = encode(tokenizer, prompts("validation", _VALIDATION_COUNT, seed))
    demonstrations = _demonstrations(seed, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / recipe.lr_warmup)
        training_step(model, optimizer, *encode(tokenizer, next(demonstrations)))
        if step % recipe.check_every == 0:
            now = accuracy(model, *validation)
            say(f"warm-up step {step}: right {now.sampled:.1%} of samples ({time.perf_counter() - began:.0f} s)")
            if now.sampled >= recipe.target:
                return now
    raise LoraError(
        "warm-up of the base model",
        reason=f"did not reach a sampled accuracy of {recipe.target:.0%} in {recipe.max_steps} steps",
        cure="choose another --seed",
    )


def _demonstrations(seed: int, recipe: BaseRecipe) -> Iterator[list[Example]]:
    """Batches of training problems with careless answers, without end."""
    rng = random.Random(f"{seed}/demonstrations")
    stream = problems("train", seed)
    while True:
        yield [
            Example(prompt=one.prompt, answer=careless_answer(one.prompt, forget=recipe.forget, rng=rng))
            for one in islice(stream, recipe.batch_size)
        ]
