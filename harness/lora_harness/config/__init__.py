"""Training configs: TOML with dotted overrides, validated before anything else happens. Needs no torch."""

from lora_harness.config.load import apply_overrides, dump_config, load_config
from lora_harness.config.rollout import RolloutSection, SglangSection
from lora_harness.config.root import TrainConfig, parse_config
from lora_harness.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    EvalSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    WarmStartSection,
)
from lora_harness.config.tasks import FunctionTask, JsonlTask, PromptSection, ReasoningGymTask, TaskSection

__all__ = [
    "AlgorithmSection",
    "CheckpointSection",
    "EvalSection",
    "FunctionTask",
    "JsonlTask",
    "LoraSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "PromptSection",
    "ReasoningGymTask",
    "RolloutSection",
    "SglangSection",
    "TaskSection",
    "TrainConfig",
    "WarmStartSection",
    "apply_overrides",
    "dump_config",
    "load_config",
    "parse_config",
]
