"""The whole training config, and how a mapping becomes one or one error that shows all its problems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from lora_harness.config import sections as s
from lora_harness.config.explain import explain
from lora_harness.config.rollout import RolloutSection
from lora_harness.config.rules import check
from lora_harness.config.tasks import TaskSection
from lora_plugins_sdk.errors import raise_if_any


class TrainConfig(s.Section):
    """One GRPO run. Built by `parse_config` or `load_config`, which also check the rules between options."""

    model: s.ModelSection
    task: TaskSection
    steps: int = Field(ge=1, description="training steps, 1 or more")
    seed: int = Field(default=0, ge=0, description="seed of prompts, sampling and adapter init, 0 or more")
    output: s.PathOption = Field(
        default=Path("runs/grpo"), description="directory that receives everything the run writes"
    )
    lora: s.LoraSection = Field(default=s.LoraSection(), description="table of adapter options")
    parallel: s.ParallelSection = Field(default=s.ParallelSection(), description="table of parallel sizes")
    rollout: RolloutSection = Field(default=RolloutSection(), description="table of sampling options")
    algorithm: s.AlgorithmSection = Field(default=s.AlgorithmSection(), description="table of GRPO options")
    optimizer: s.OptimizerSection = Field(default=s.OptimizerSection(), description="table of AdamW options")
    warm_start: s.WarmStartSection = Field(
        default=s.WarmStartSection(), description="table of where the adapter starts"
    )
    checkpoint: s.CheckpointSection = Field(default=s.CheckpointSection(), description="table of checkpoint options")
    eval: s.EvalSection = Field(default=s.EvalSection(), description="table of evaluation options")


def parse_config(raw: Mapping[str, Any], *, title: str = "the config cannot be used:") -> TrainConfig:
    """Validate `raw` (as TOML parses) into a config.

    Args:
        raw: nested tables of plain values.
        title: first line of the error, e.g. naming the file.

    Raises:
        LoraError: one error listing every unknown key, wrong value, contradiction and option without effect.
    """
    try:
        config = TrainConfig.model_validate(raw)
    except ValidationError as error:
        found = explain(error, TrainConfig)
        broken = {item["loc"][0] for item in error.errors()}
        raise_if_any(title, [*found, *check(_valid_parts(raw, broken))])
        raise
    raise_if_any(title, check({name: getattr(config, name) for name in TrainConfig.model_fields}))
    return config


def _valid_parts(raw: Mapping[str, Any], broken: set[Any]) -> dict[str, Any]:
    """The parts of a config in which pydantic found nothing wrong, validated; absent ones are their
    defaults."""
    parts: dict[str, Any] = {}
    for name, field in TrainConfig.model_fields.items():
        if name not in broken:
            annotation: Any = field.annotation
            parts[name] = TypeAdapter(annotation).validate_python(raw[name]) if name in raw else field.default
    return parts
