"""Small whole runs in test worlds: a tiny Qwen3, a toy reward, a checkpoint in the middle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tiny_model import write_tiny_qwen3

from lora_harness.config import TrainConfig, parse_config
from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer
from lora_harness.train import Trainer
from lora_plugins_sdk.testing import Layout, current_run

STEPS, CUT = 6, 3
TARGETS = ["all-linear", "embed_tokens"]


def write_model(directory: Path, *, layers: int = 2) -> Path:
    """A tiny Qwen3 with a tokenizer."""
    write_tiny_qwen3(directory, layers=layers, vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(directory)
    return directory


def raw_config(model: Path, output: Path, layout: Layout = Layout()) -> dict[str, Any]:  # noqa: B008
    """A config as TOML parses; two updates a step, so that the minibatches' order counts too."""
    return {
        "steps": STEPS,
        "seed": 3,
        "output": str(output),
        "model": {"path": str(model)},
        "task": {"kind": "function", "prompts": "toy_rewards:prompts", "reward": "toy_rewards:reward"},
        "lora": {"rank": 4, "alpha": 8.0, "target_modules": TARGETS},
        "parallel": {
            "tp": layout.tp,
            "pp": layout.pp,
            "sequence_parallel": layout.sequence_parallel,
            "micro_batch_size": 3,
        },
        "algorithm": {"prompts_per_step": 4, "group_size": 3, "minibatches": 2, "kl_coef": 0.05},
        "optimizer": {"lr": 0.002, "schedule": "cosine"},
        "rollout": {"max_new_tokens": 4},
        "eval": {"count": 4, "every": CUT},
        "checkpoint": {"every": CUT, "keep": 9},
    }


def config_of(model: Path, output: Path, layout: Layout = Layout(), **changes: Any) -> TrainConfig:  # noqa: B008
    """`raw_config` with whole top-level entries changed."""
    return parse_config(raw_config(model, output, layout) | changes)


def train(config: TrainConfig, resume: str | None = None, *, load_weights_only: bool = False) -> None:
    """A whole run on this rank, from whatever state the global generators are in."""
    junk = random.SystemRandom().getrandbits(32)
    random.seed(junk)
    torch.manual_seed(junk)
    Trainer(config, current_run(), resume=resume, load_weights_only=load_weights_only).train()


def rows(output: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without what differs between two equal runs."""
    parsed = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("seconds_")} for row in parsed]
