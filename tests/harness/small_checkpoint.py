"""A checkpoint of a few numbers, for tests of the files alone."""

from __future__ import annotations

from pathlib import Path

import torch

from lora_harness.checkpoint import Checkpoint, CheckpointDirectory, RunIdentity, RunState, write_checkpoint
from lora_plugins_sdk import PeftAdapter

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def small_state(step: int) -> RunState:
    identity = RunIdentity(
        base="0" * 64, plugin="toy", plugin_version="1", table="1" * 64, warm_start=None, config={"steps": 9}
    )
    return RunState(
        format=1,
        step=step,
        updates=step,
        adapter_version=step,
        adapter_published=False,
        reward_before=0.1,
        seconds=1.5,
        prompts="2" * 64,
        identity=identity,
        files={},
    )


def small_tensors(step: int, size: int = 64) -> Checkpoint:
    """Every value is the step."""
    full = torch.full((4, size), float(step))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    moments = {f"{moment}.{NAME}": full + 0.5 for moment in ("exp_avg", "exp_avg_sq")}
    return Checkpoint(adapter=PeftAdapter(tensors={NAME: full}, config=config), moments=moments)


def save(output: Path, step: int, *, keep: int = 9, size: int = 64) -> Path:
    """Save and prune as a run does; returns the checkpoint."""
    checkpoints = CheckpointDirectory(output)
    checkpoints.prepare()
    write_checkpoint(checkpoints.place(step), small_tensors(step, size), small_state(step))
    checkpoints.prune(keep)
    return checkpoints.place(step)
