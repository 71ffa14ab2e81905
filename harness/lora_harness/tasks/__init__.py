"""Tasks: where prompts come from and how completions are scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from lora_harness.tasks.base import Example, Split, Task

if TYPE_CHECKING:
    from lora_harness.config.tasks import FunctionTask, JsonlTask, ReasoningGymTask


def build_task(section: ReasoningGymTask | JsonlTask | FunctionTask) -> Task:
    """The task of a config's ``[task]`` section.

    Raises:
        LoraError: the data set, file or function it names cannot be used.
    """
    match section.kind:
        case "reasoning_gym":
            from lora_harness.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(section)
        case "jsonl":
            from lora_harness.tasks.jsonl import JsonlTask

            return JsonlTask(section)
        case "function":
            from lora_harness.tasks.function import FunctionTask

            return FunctionTask(section)
    assert_never(section)


__all__ = ["Example", "Split", "Task", "build_task"]
