"""GRPO with LoRA, start to end: the loop one can read in one sitting.

A step: publish the adapter to the engine, draw a group of completions per prompt, score them, turn scores into
    advantages, update.

What differs from GRPO as published (Shao et al. 2024):
- the loss is normalised over the whole update's tokens by default, not per sequence (`algorithm.loss_norm`);
- with one update per step the policy ratio is exactly 1, so nothing is clipped and old log-probs are not computed;
- the reference is the base itself, the adapter switched off;
- groups whose rewards are all equal stay in the batch and contribute zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lora_harness.advantages import degenerate_share, group_advantages
from lora_harness.batch import StepBatch, pack
from lora_harness.config import TrainConfig
from lora_harness.engines import RolloutEngine, SamplingParams, create_engine
from lora_harness.launch import run_device, started
from lora_harness.losses import loss_normaliser
from lora_harness.phases import PhaseTimer
from lora_harness.prompts import PromptEncoder
from lora_harness.report import RunReport
from lora_harness.rollouts import Rollout, RolloutCollector, mean_reward
from lora_harness.schedule import learning_rate
from lora_harness.tasks import Example, build_task
from lora_harness.trainer import MegatronPolicy, UpdateReport
from lora_plugins_sdk import ParallelRun, write_adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """What a run leaves behind.

    Args:
        output: directory of all files.
        adapter: PEFT directory of the final adapter.
        reward_before, reward_after: mean held-out reward.
    """

    output: Path
    adapter: Path
    reward_before: float
    reward_after: float


def run_training(config: TrainConfig) -> TrainingResult:
    """Train an adapter. Every started rank calls it.

    Args:
        config: the training config.

    Raises:
        LoraError: before anything is written when the task, tokenizer, model or engine cannot be used; later, on
            every rank, when a completion cannot be drawn or scored.
    """
    with started(config.parallel, seed=config.seed) as run:
        return Trainer(config, run).train()


class Trainer:
    """One run: the parts, and the loop over them.

    Args:
        config: the training config.
        run: this rank's place.
    """

    def __init__(self, config: TrainConfig, run: ParallelRun) -> None:
        self.config = config
        self.run = run
        task = build_task(config.task)
        self.encoder = PromptEncoder(config.model.path, config.task)
        total = config.steps * config.algorithm.prompts_per_step
        self.prompts = task.prompts("train", total, config.seed)
        self.held_out = list(task.prompts("eval", config.eval.count, config.seed))
        self.policy = MegatronPolicy(config, run)
        self.engine: RolloutEngine = create_engine(
            config.rollout.engine,
            config.model.path,
            max_batch_size=config.rollout.max_batch_size,
            device=str(run_device()),
        )
        self.collector = RolloutCollector(self.engine, task, self.encoder, seed=config.seed)
        self.version = 0
        self._published_at = -1

    def train(self) -> TrainingResult:
        """Run all steps and write everything to the output directory."""
        config = self.config
        with RunReport(config, writes=dist.get_rank() == 0) as report:
            report.start(trained_parameters=self.policy.trained_parameters)
            before = self.evaluate("eval/before")
            for step in range(config.steps):
                row = self.step(step)
                if config.eval.every and (step + 1) % config.eval.every == 0:
                    row["bytes_synced"] += self.publish()
                    row["eval_reward"] = self.evaluate(f"eval/{step}")
                report.step(row)
            self.publish()
            after = self.evaluate("eval/after")
            adapter = config.output / "adapter"
            exported = self.policy.export()
            if dist.get_rank() == 0:
                write_adapter(exported, adapter)
            report.finish(reward_before=before, reward_after=after)
        self.engine.close()
        return TrainingResult(output=config.output, adapter=adapter, reward_before=before, reward_after=after)

    def step(self, step: int) -> dict[str, Any]:
        """One training step; returns its row of metrics, the same on every rank."""
        algorithm, phase = self.config.algorithm, PhaseTimer()
        with phase("sync"):
            bytes_synced = self.publish()
        with phase("rollout"):
            groups = self.draw(step)
        rewards = torch.tensor([[one.reward for one in group] for group in groups], dtype=torch.float64)
        with phase("train"):
            batch = self.batch_of(groups, group_advantages(rewards, algorithm.advantage))
            reports = self.learn(batch, step)
        stats = reports[0].stats
        for one in reports[1:]:
            stats = stats + one.stats
        rollouts = [one for group in groups for one in group]
        drawn = sum(len(one.completion.token_ids) for one in rollouts)
        return {
            "step": step,
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "degenerate_share": degenerate_share(rewards),
            **stats.values(),
            "grad_norm": sum(one.grad_norm for one in reports) / len(reports),
            "lr": learning_rate(step, steps=self.config.steps, optimizer=self.config.optimizer),
            "tokens": drawn,
            "completion_length": drawn / len(rollouts),
            "truncated_share": sum(one.completion.finish_reason == "length" for one in rollouts) / len(rollouts),
            "adapter_version": rollouts[0].completion.adapter_version,
            "bytes_synced": bytes_synced,
            "seconds": phase.seconds,
        }

    def publish(self) -> int:
        """Give the engine the adapter as it is now; returns the bytes it took, 0 when it has this adapter already."""
        if self._published_at == self.policy.updates:
            return 0
        self._published_at = self.policy.updates
        exported = self.policy.export()
        self.version += 1
        return self.engine.load_adapter(self.version, exported.tensors, exported.config)

    def draw(self, step: int) -> list[list[Rollout]]:
        """The step's completions, one group per prompt."""
        algorithm = self.config.algorithm
        first = step * algorithm.prompts_per_step
        examples: list[Example] = list(self.prompts[first : first + algorithm.prompts_per_step])
        return self.collector.collect(
            examples,
            samples=algorithm.group_size,
            sampling=self._sampling(self.config.rollout.temperature),
            occasion=f"train/{step}",
        )

    def batch_of(self, groups: list[list[Rollout]], advantages: torch.Tensor) -> StepBatch:
        """The step's completions as tensors; groups stay together."""
        return pack(
            [one.drawn() for group in groups for one in group],
            advantages.flatten(),
            pad_id=self.encoder.pad_id,
            multiple=self.run.facts.tp if self.run.facts.sequence_parallel else 1,
            device=run_device(),
        )

    def learn(self, batch: StepBatch, step: int) -> list[UpdateReport]:
        """All optimizer updates of a step."""
        algorithm = self.config.algorithm
        reference = self.policy.logprobs(batch, reference=True)
        old = self.policy.logprobs(batch, reference=False) if algorithm.updates_per_step > 1 else None
        lr = learning_rate(step, steps=self.config.steps, optimizer=self.config.optimizer)
        lengths = batch.lengths
        return [
            self.policy.update(
                batch,
                rows,
                normaliser=loss_normaliser(
                    algorithm.loss_norm, (lengths[row] for row in rows), self.config.rollout.max_new_tokens
                ),
                lr=lr,
                ref_logprobs=reference,
                old_logprobs=old,
            )
            for rows in self._updates(len(lengths), step)
        ]

    def evaluate(self, occasion: str) -> float:
        """Mean reward on the held-out prompts with the adapter that the engine holds."""
        section = self.config.eval
        groups = self.collector.collect(
            self.held_out, samples=section.samples, sampling=self._sampling(section.temperature), occasion=occasion
        )
        return mean_reward(groups)

    def _updates(self, sequences: int, step: int) -> Iterator[list[int]]:
        """Rows of each optimizer update: every epoch deals the sequences into minibatches anew."""
        algorithm = self.config.algorithm
        if algorithm.updates_per_step == 1:
            yield list(range(sequences))
            return
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        for _ in range(algorithm.epochs):
            order = torch.randperm(sequences, generator=generator)
            for rows in order.tensor_split(algorithm.minibatches):
                yield sorted(rows.tolist())

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.config.rollout.max_new_tokens,
            temperature=temperature,
            stop_token_ids=self.encoder.stop_ids,
        )
