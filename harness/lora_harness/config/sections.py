"""The sections of a training config: every option, its type, its default and what it does.

An option that only has an effect together with another one is ``None`` where it has none; setting it there is
an error (see `rules`), and where it does have an effect ``None`` is replaced by the documented default. A
dumped config therefore shows what the run really used and reloads equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lora_plugins_sdk.config import LoraConfig

PathOption = Annotated[Path, Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of all sections: immutable, strictly typed, no unknown keys, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def _fill(self, **defaults: object) -> None:
        """Give options that are still None the default that holds once they have an effect.

        For validators only: afterwards the model does not change.
        """
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)


class ModelSection(Section):
    path: PathOption = Field(description="local Hugging Face directory: config.json, *.safetensors, tokenizer files")
    plugin: str | None = Field(default=None, description="name of the model plugin; by default found from model_type")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the base model's weights and forward"
    )


class LoraSection(Section):
    rank: int = Field(default=16, ge=1, description="rank of every adapter pair, 1 or more")
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="scaling numerator (positive): the delta is multiplied by alpha / rank",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        le=0,
        description="always 0: RL trains with dropout 0, else the policy trained is not the policy that sampled",
    )
    use_rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) (rank-stabilised LoRA)")
    target_modules: Names = Field(
        default=("all-linear",),
        min_length=1,
        description="list of projection names, wildcards or 'all-linear'",
    )
    exclude_modules: Names = Field(default=(), description="list of names or wildcards taken away from the targets")
    scope: Literal["all", "language", "vision"] = Field(
        default="all",
        description="region of a multimodal model that is adapted: 'all', 'language' or 'vision'",
    )

    expert_sharing: Literal["none", "outer"] = Field(
        default="none",
        description="'none': each routed expert has its own factors; 'outer': those on the hidden side are shared",
    )

    def to_sdk(self, *, seed: int) -> LoraConfig:
        """The SDK's config of this adapter. Factors are stored in fp32, so the optimizer needs no master
        copy."""
        return LoraConfig(**self.model_dump(), seed=seed)


class ParallelSection(Section):
    tp: int = Field(default=1, ge=1, description="tensor parallel size, 1 or more")
    pp: int = Field(default=1, ge=1, description="pipeline parallel size, 1 or more")
    ep: int = Field(default=1, ge=1, description="expert parallel size: ranks that share out the routed experts")
    etp: int | None = Field(default=None, ge=1, description="tensor parallel size within one expert; default tp")
    sequence_parallel: bool = Field(
        default=False, description="split activations between TP regions along the sequence"
    )
    micro_batch_size: int = Field(default=8, ge=1, description="sequences in one forward pass of one rank, 1 or more")


class AlgorithmSection(Section):
    prompts_per_step: int = Field(default=16, ge=1, description="different prompts in one training step, 1 or more")
    group_size: int = Field(
        default=8, ge=2, description="completions per prompt, 2 or more (1 makes every advantage zero)"
    )
    advantage: Literal["grpo", "dr_grpo"] = Field(
        default="grpo", description="'grpo' divides by the group's standard deviation, 'dr_grpo' does not"
    )
    minibatches: int = Field(
        default=1, ge=1, description="optimizer updates in one pass over a step's batch, 1 or more"
    )
    epochs: int = Field(default=1, ge=1, description="passes over a step's batch, 1 or more")
    clip_low: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="ratio is clipped below at 1 - clip_low, between 0 and 1; default 0.2 with several updates a step",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0,
        description="ratio is clipped above at 1 + clip_high; default 0.2 with several updates a step",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the reference in the loss; 0 turns it off"
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="estimator of the KL: 'k1', 'k2' or 'k3'; default 'k3' with kl_coef above 0"
    )
    loss_norm: Literal["token", "sequence", "constant"] = Field(
        default="token",
        description="'token': mean over the update's tokens; 'sequence': mean over sequences of their token "
        "means; 'constant': sum over tokens divided by sequences * max_new_tokens, as Dr. GRPO",
    )

    @model_validator(mode="after")
    def _defaults(self) -> AlgorithmSection:
        if self.updates_per_step > 1:
            self._fill(clip_low=0.2, clip_high=0.2)
        if self.kl_coef > 0:
            self._fill(kl_estimator="k3")
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in one training step. With 1 the policy ratio is exactly 1 and clipping cannot
        act."""
        return self.minibatches * self.epochs

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


class OptimizerSection(Section):
    lr: float = Field(default=1e-4, gt=0, description="peak learning rate of AdamW, above 0")
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="two AdamW betas"
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon, above 0")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, 0 or more")
    clip_grad: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0 turns clipping off")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after the warmup"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the rate rises linearly to lr, 0 or more")
    min_lr: float | None = Field(
        default=None, ge=0, description="learning rate that 'linear' or 'cosine' ends at; default 0"
    )

    @model_validator(mode="after")
    def _defaults(self) -> OptimizerSection:
        if self.schedule != "constant":
            self._fill(min_lr=0.0)
        return self


class CheckpointSection(Section):
    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 writes none")
    keep: int | None = Field(
        default=None, ge=1, description="newest checkpoints that stay, 1 or more; default 2 with every above 0"
    )

    @model_validator(mode="after")
    def _defaults(self) -> CheckpointSection:
        if self.every > 0:
            self._fill(keep=2)
        return self


class WarmStartSection(Section):
    adapter: PathOption | None = Field(
        default=None, description="PEFT directory that training starts from; same rank, alpha and targets as in lora"
    )
    reference: Literal["base", "warm_start"] | None = Field(
        default=None,
        description="policy that the KL is measured from: 'base' without an adapter, or the frozen 'warm_start' "
        "adapter; default 'warm_start' with adapter",
    )

    @model_validator(mode="after")
    def _defaults(self) -> WarmStartSection:
        if self.adapter is not None:
            self._fill(reference="warm_start")
        return self


class EvalSection(Section):
    count: int = Field(default=64, ge=1, description="held-out prompts in one evaluation, 1 or more")
    every: int = Field(
        default=0, ge=0, description="steps between evaluations; 0 evaluates before and after training only"
    )
    temperature: float = Field(default=0.0, ge=0, description="sampling temperature; 0 is greedy")
    samples: int = Field(default=1, ge=1, description="completions per prompt, 1 or more; the reward is their mean")
