"""Learning rate of a training step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_harness.config import OptimizerSection


def learning_rate(step: int, *, steps: int, optimizer: OptimizerSection) -> float:
    """The rate of every optimizer update within training step `step`.

    During warmup step k of w uses ``lr * (k + 1) / w``. Then, with p going from 0 towards 1 over the
    remaining steps (1 would be the step after the last, so that no update has rate 0), ``constant`` stays at
    lr, ``linear`` is ``lr + p * (min_lr - lr)`` and ``cosine`` is ``min_lr + (lr - min_lr) * (1 + cos(pi *
    p)) / 2`` (Loshchilov and Hutter 2017, SGDR, eq. 5).

    Args:
        step: 0-based, below `steps`.
        steps: length of the run.
        optimizer: the optimizer section of the config.
    """
    assert 0 <= step < steps, f"step {step} is outside a run of {steps} steps"
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    assert optimizer.min_lr is not None
    progress = (step - optimizer.warmup_steps) / (steps - optimizer.warmup_steps)
    share = 1.0 - progress if optimizer.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share
