"""The ``[task]`` section: one model per kind of task, told apart by the key ``kind``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lora_harness.config.sections import PathOption, Section

# "package.module:function"
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class PromptSection(Section):
    """What every kind of task shares: how a prompt is put before the model."""

    template: str = Field(default="{prompt}", description="text around the prompt; must contain {prompt}")
    chat_template: bool = Field(default=False, description="render the prompt through the tokenizer's chat template")
    system_prompt: str | None = Field(default=None, description="system message; needs chat_template = true")
    answer_tag: str | None = Field(
        default=None,
        min_length=1,
        description="score only the last <tag>...</tag> of a completion instead of its whole text",
    )


class ReasoningGymTask(PromptSection):
    kind: Literal["reasoning_gym"]
    dataset: str = Field(description="name of a reasoning-gym data set, e.g. 'chain_sum'")
    params: dict[str, Any] = Field(default={}, description="table of the data set's own options; not seed and size")


class JsonlTask(PromptSection):
    kind: Literal["jsonl"]
    train_path: PathOption = Field(description="JSONL file, one object a line")
    eval_path: PathOption | None = Field(
        default=None,
        description="JSONL file of held-out rows, eval.count or more; none of their prompts may be in train_path",
    )
    eval_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of train_path's different prompts held out when there is no eval_path; rows of one prompt "
        "stay together, and eval.count or more must be held out; default 0.1",
    )
    prompt_key: str = Field(default="prompt", description="key of a row that holds the prompt text")
    answer_key: str = Field(default="answer", description="key of a row that holds the right answer")
    scorer: Literal["exact", "math_verify"] | ImportPath = Field(
        default="exact",
        description="'exact' (text equal after stripping), 'math_verify' or a reward 'module:function'",
    )

    @model_validator(mode="after")
    def _defaults(self) -> JsonlTask:
        if self.eval_path is None:
            self._fill(eval_fraction=0.1)
        return self


class FunctionTask(PromptSection):
    kind: Literal["function"]
    prompts: ImportPath = Field(description="'module:function' called as function(split, count, seed, **params)")
    reward: ImportPath = Field(description="'module:function' called as function(example, completion)")
    params: dict[str, Any] = Field(default={}, description="table of keyword arguments handed to the prompts function")


TaskSection = Annotated[ReasoningGymTask | JsonlTask | FunctionTask, Field(discriminator="kind")]
