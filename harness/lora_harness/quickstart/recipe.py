"""The numbers of the quickstart: the small model, its warm-up and the GRPO run. Measured on 2 CPU cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_harness.config import TrainConfig, apply_overrides, parse_config
from lora_plugins_sdk.errors import Diagnostic, raise_if_any

DEFAULT_STEPS = 120

_MAKES = "leave it out; the quickstart makes a base and a task, `lora-grpo train` takes yours"
OWN_KEYS = {
    "model.path": _MAKES,
    "task": _MAKES,
    "output": "use --output",
    "seed": "use --seed",
    "steps": "use --steps",
    "rollout.engine": "use --engine",
    "rollout.mode": "use --mode",
    "rollout.sglang.python": "use --sglang-python",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecipe:
    """How the base model is made.

    Args:
        model: HF config, without a vocabulary.
        forget: how often the demonstrations forget a carry. About a third of the sums have none to forget, so a
            perfect imitation is right in 40 % of its samples, and the warm-up cannot leave the window upwards.
        target: the warm-up ends at this sampled accuracy on validation problems.
        check_every, max_steps: when it is checked, and when the warm-up gives up.
        batch_size, lr, lr_warmup: demonstrations per step, AdamW's learning rate, steps of its linear rise.
        head_scale: factor on the initial output head. Only its scale lets a LoRA that leaves the head frozen
            become certain of a token; at transformers' default it cannot.
    """

    model: Mapping[str, Any]
    forget: float = 0.8
    target: float = 0.34
    check_every: int = 20
    max_steps: int = 1200
    batch_size: int = 256
    lr: float = 2e-3
    lr_warmup: int = 30
    head_scale: float = 4.0


def training_config(
    *,
    base: Path,
    output: Path,
    engine: str,
    seed: int,
    steps: int,
    mode: str | None = None,
    sglang_python: Path | None = None,
    overrides: Sequence[str] = (),
) -> TrainConfig:
    """The GRPO run of the quickstart, an ordinary training config.

    Args:
        base: HF directory of the base.
        output: the run's directory.
        engine: rollout engine.
        seed, steps: of the run.
        mode: how the policy reaches SGLang.
        sglang_python: interpreter that has SGLang.
        overrides: `KEY=VALUE` of further options of a training config, as for `lora-grpo train --set`.

    Raises:
        LoraError: a value that no run can have, e.g. a negative seed, a mode that the engine does not have, or an
            override of what the quickstart decides itself.
    """
    raise_if_any("the quickstart cannot be run:", _taken(overrides))
    rollout: dict[str, Any] = {"engine": engine, "max_new_tokens": 5, "temperature": 1.0, "max_batch_size": 512}
    # fp32 on both sides: a larger gap means that another policy samples than is trained.
    rollout["max_logprob_gap"] = 1e-3
    if mode is not None:
        rollout["mode"] = mode
    if sglang_python is not None:
        rollout["sglang"] = {"python": str(sglang_python)}
    raw: dict[str, Any] = {
        "model": {"path": str(base)},
        "task": {
            "kind": "function",
            "prompts": "lora_harness.quickstart.arithmetic:prompts",
            "reward": "lora_harness.quickstart.arithmetic:reward",
        },
        "steps": steps,
        "seed": seed,
        "output": str(output),
        "lora": {"rank": 16, "alpha": 32.0},
        "parallel": {"micro_batch_size": 256},
        "rollout": rollout,
        "algorithm": {"prompts_per_step": 64, "group_size": 8},
        "optimizer": {"lr": 2e-3, "schedule": "linear"},
        # Sampled as training samples; greedy accuracy is shown beside it.
        "eval": {"count": 512, "samples": 4, "temperature": 1.0},
    }
    apply_overrides(raw, overrides)
    return parse_config(raw, title="the quickstart cannot be run:")


def _taken(overrides: Sequence[str]) -> Iterator[Diagnostic]:
    """Overrides of what the quickstart's own options say, or of the base and the task that it makes."""
    for key in (override.partition("=")[0].strip() for override in overrides):
        cure = next((how for own, how in OWN_KEYS.items() if key == own or key.startswith(f"{own}.")), None)
        if cure is not None:
            yield Diagnostic(subject=f"--set {key}", reason="is decided by the quickstart itself", cure=cure)
