"""Rules between options: what contradicts, and what would have no effect.

A rule is a generator whose parameters name the parts of the config that it reads. It runs when all of these
parts are valid on their own, so one launch shows type errors and contradictions together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from lora_harness.config import sections as s
from lora_harness.config import tasks as t
from lora_harness.config.rollout_rules import ROLLOUT_RULES, no_effect
from lora_plugins_sdk.errors import Diagnostic


def sequence_parallel_needs_tp(parallel: s.ParallelSection) -> Iterator[Diagnostic]:
    if parallel.sequence_parallel and parallel.tp == 1:
        yield no_effect(
            "parallel.sequence_parallel", "with parallel.tp = 1", "remove it, or set parallel.tp to 2 or more"
        )


def clip_needs_several_updates(algorithm: s.AlgorithmSection) -> Iterator[Diagnostic]:
    for key in ("clip_low", "clip_high"):
        if getattr(algorithm, key) is not None and algorithm.updates_per_step == 1:
            yield no_effect(
                f"algorithm.{key}",
                "with one optimizer update per step: the policy ratio is exactly 1",
                "remove it, or set algorithm.minibatches or algorithm.epochs to 2 or more",
            )


def kl_estimator_needs_coef(algorithm: s.AlgorithmSection) -> Iterator[Diagnostic]:
    if algorithm.kl_estimator is not None and algorithm.kl_coef == 0:
        yield no_effect(
            "algorithm.kl_estimator",
            "with algorithm.kl_coef = 0",
            "remove it, or set algorithm.kl_coef above 0",
        )


def minibatches_hold_whole_groups(algorithm: s.AlgorithmSection) -> Iterator[Diagnostic]:
    if algorithm.prompts_per_step % algorithm.minibatches:
        yield Diagnostic(
            subject="algorithm.minibatches",
            reason=f"{algorithm.minibatches} does not divide prompts_per_step = {algorithm.prompts_per_step}",
            cure="choose a divisor, so that every minibatch holds the same number of groups",
        )


def betas_in_range(optimizer: s.OptimizerSection) -> Iterator[Diagnostic]:
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Diagnostic(
            subject="optimizer.betas",
            reason=f"{list(optimizer.betas)} are not both in [0, 1)",
            cure="use e.g. [0.9, 0.999]",
        )


def min_lr_needs_decay(optimizer: s.OptimizerSection) -> Iterator[Diagnostic]:
    if optimizer.min_lr is None:
        return
    if optimizer.schedule == "constant":
        yield no_effect(
            "optimizer.min_lr",
            "with optimizer.schedule = 'constant'",
            "remove it, or set optimizer.schedule to 'linear' or 'cosine'",
        )
    elif optimizer.min_lr >= optimizer.lr:
        yield Diagnostic(
            subject="optimizer.min_lr",
            reason=f"{optimizer.min_lr} is not below optimizer.lr = {optimizer.lr}",
            cure="lower it, or use optimizer.schedule = 'constant'",
        )


def warmup_ends_before_training(optimizer: s.OptimizerSection, steps: int) -> Iterator[Diagnostic]:
    if optimizer.warmup_steps >= steps:
        yield Diagnostic(
            subject="optimizer.warmup_steps",
            reason=f"{optimizer.warmup_steps} is not below steps = {steps}: training would end in the warmup",
            cure="lower it, or raise steps",
        )


def eval_every_within_training(eval: s.EvalSection, steps: int) -> Iterator[Diagnostic]:
    if eval.every >= steps:
        yield no_effect(
            "eval.every",
            f"when it is not below steps = {steps}: evaluation before and after always runs",
            "lower it or remove it",
        )


def checkpoint_every_within_training(checkpoint: s.CheckpointSection, steps: int) -> Iterator[Diagnostic]:
    if checkpoint.every > steps:
        yield no_effect("checkpoint.every", f"above steps = {steps}", "lower it or remove it")


def keep_needs_checkpoints(checkpoint: s.CheckpointSection) -> Iterator[Diagnostic]:
    if checkpoint.keep is not None and checkpoint.every == 0:
        yield no_effect("checkpoint.keep", "with checkpoint.every = 0", "remove it, or set checkpoint.every")


def reference_needs_warm_start(warm_start: s.WarmStartSection) -> Iterator[Diagnostic]:
    if warm_start.reference is not None and warm_start.adapter is None:
        yield no_effect(
            "warm_start.reference",
            "without warm_start.adapter: the reference is the base",
            "remove it, or set warm_start.adapter",
        )


def greedy_samples_are_equal(eval: s.EvalSection) -> Iterator[Diagnostic]:
    if eval.samples > 1 and eval.temperature == 0:
        yield no_effect(
            "eval.samples",
            "with eval.temperature = 0: greedy completions of one prompt are all the same",
            "set it to 1, or set eval.temperature above 0",
        )


def template_holds_prompt(task: t.PromptSection) -> Iterator[Diagnostic]:
    if "{prompt}" not in task.template:
        yield Diagnostic(
            subject="task.template",
            reason=f"{task.template!r} does not contain {{prompt}}: every prompt would be the same text",
            cure="put {prompt} where the prompt belongs",
        )


def system_prompt_needs_chat(task: t.PromptSection) -> Iterator[Diagnostic]:
    if task.system_prompt is not None and not task.chat_template:
        yield no_effect(
            "task.system_prompt",
            "without a chat template",
            "set task.chat_template = true, or put the text into task.template",
        )


def one_source_of_held_out_rows(task: t.PromptSection) -> Iterator[Diagnostic]:
    if isinstance(task, t.JsonlTask) and task.eval_path is not None and task.eval_fraction is not None:
        yield no_effect("task.eval_fraction", "next to task.eval_path", "remove one of the two")


def generator_params_are_free(task: t.PromptSection) -> Iterator[Diagnostic]:
    taken = {t.ReasoningGymTask: ("seed", "size"), t.FunctionTask: ("split", "count", "seed")}.get(type(task), ())
    for key in taken:
        if key in getattr(task, "params", {}):
            yield Diagnostic(
                subject=f"task.params.{key}",
                reason="is set by the harness, which keeps training and held-out prompts apart",
                cure="remove it; use the top-level seed, algorithm.prompts_per_step and eval.count",
            )


RULES = (
    sequence_parallel_needs_tp,
    clip_needs_several_updates,
    kl_estimator_needs_coef,
    minibatches_hold_whole_groups,
    betas_in_range,
    min_lr_needs_decay,
    warmup_ends_before_training,
    eval_every_within_training,
    checkpoint_every_within_training,
    keep_needs_checkpoints,
    reference_needs_warm_start,
    greedy_samples_are_equal,
    template_holds_prompt,
    system_prompt_needs_chat,
    one_source_of_held_out_rows,
    generator_params_are_free,
    *ROLLOUT_RULES,
)


def check(parts: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Run every rule whose parts are in `parts` (top-level key -> validated value)."""
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if names.keys() <= parts.keys():
            yield from rule(**{name: parts[name] for name in names})
