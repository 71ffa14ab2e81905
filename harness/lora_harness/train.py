"""GRPO with LoRA, start to end: the loop one can read in one sitting.

A step: publish the adapter to the engine, draw a group of completions per prompt, score them, turn scores into
    advantages, update.

What differs from GRPO as published (Shao et al. 2024):
- the loss is normalised over the whole update's tokens by default, not per sequence (`algorithm.loss_norm`);
- with one update per step the policy ratio is exactly 1, so nothing is clipped and old log-probs are not computed;
- the reference is the base itself, the adapter switched off, or the frozen adapter of a warm start;
- groups whose rewards are all equal stay in the batch and contribute zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lora_harness.advantages import degenerate_share, group_advantages
from lora_harness.batch import StepBatch, pack
from lora_harness.checkpoint import CheckpointDirectory, RunState, read_checkpoint, write_checkpoint
from lora_harness.config import TrainConfig
from lora_harness.context import refuse_beyond_context
from lora_harness.engines import RolloutEngine, SamplingParams, open_engine
from lora_harness.engines.capabilities import refuse_unservable
from lora_harness.engines.sglang.interpreter import refuse_without_sglang
from lora_harness.launch import run_device, started
from lora_harness.losses import loss_normaliser
from lora_harness.parity import GapReport, gap_report, refuse_gap, worst_of
from lora_harness.phases import PhaseTimer
from lora_harness.prompts import PromptEncoder
from lora_harness.ranks import is_first_rank, on_every_rank, on_first_rank
from lora_harness.report import RunReport
from lora_harness.rollouts import Rollout, RolloutCollector, mean_reward
from lora_harness.schedule import learning_rate
from lora_harness.start import PromptDigest, Start, choose_start, owned_output
from lora_harness.tasks import Example, build_task
from lora_harness.trainer import MegatronPolicy, UpdateReport
from lora_plugins_sdk import ParallelRun, PeftAdapter, base_fingerprint, write_adapter


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


def run_training(config: TrainConfig, *, resume: str | None = None, load_weights_only: bool = False) -> TrainingResult:
    """Train an adapter. Every started rank calls it.

    Args:
        config: the training config.
        resume: `auto` or the path of a checkpoint; see `choose_start`.
        load_weights_only: take the weights of the checkpoint at `resume` and begin at step 0.

    Raises:
        LoraError: before anything is written when the task, tokenizer, model, engine or checkpoint cannot be used;
            later, on every rank, when a completion cannot be drawn or scored, or a checkpoint cannot be written.
    """
    with started(config) as run:
        return Trainer(config, run, resume=resume, load_weights_only=load_weights_only).train()


class Trainer:
    """One run: the parts, and the loop over them.

    Args:
        config: the training config.
        run: this rank's place.
        resume, load_weights_only: as for `run_training`.
    """

    def __init__(
        self, config: TrainConfig, run: ParallelRun, *, resume: str | None = None, load_weights_only: bool = False
    ) -> None:
        self.config = config
        self.run = run
        task = build_task(config.task)
        self.encoder = PromptEncoder(config.model.path, config.task)
        total = config.steps * config.algorithm.prompts_per_step
        self.prompts = task.prompts("train", total, config.seed)
        self.held_out = list(task.prompts("eval", config.eval.count, config.seed))
        self.start: Start = on_first_rank(
            lambda: choose_start(config, run.facts, self.prompts, resume=resume, weights_only=load_weights_only)
        )
        first = self.prompts[: config.algorithm.prompts_per_step]
        on_first_rank(lambda: refuse_beyond_context(config, self.encoder, [*self.held_out, *first]))
        on_first_rank(lambda: refuse_unservable(config, run.facts))
        on_first_rank(lambda: refuse_without_sglang(config.rollout.sglang))
        self.policy = MegatronPolicy(config, run)
        self.engine: RolloutEngine = open_engine(config, self.policy.export, device=str(run_device()))
        self.collector = RolloutCollector(self.engine, task, self.encoder, seed=config.seed)
        self.version = 0
        self.gaps: list[GapReport] = []
        self._published_at = self._compared_at = -1
        self._skipped = 0
        self.trained_on = PromptDigest()
        self._load()

    def train(self) -> TrainingResult:
        """Run all steps and write everything to the output directory."""
        config, start = self.config, self.start
        first_rank = is_first_rank()
        with ExitStack() as stack:
            stack.callback(self.engine.close)
            owned = owned_output(config.output, start.resume_at)
            removed = on_first_rank(lambda: stack.enter_context(owned))
            report = RunReport(config, writes=first_rank, resume_at=start.resume_at)
            on_every_rank(lambda: stack.enter_context(report))
            resumed = start.resumed
            report.start(trained_parameters=self.policy.trained_parameters, seconds=resumed.seconds if resumed else 0.0)
            if start.note:
                report.say(start.note)
            if self.policy.pinned_modules:
                held = ", ".join(self.policy.pinned_modules)
                report.say(f"held at zero, since the engine cannot serve them: {held} (rollout.mode = 'merge' can)")
            if removed:
                report.say(f"removed the later checkpoints of steps {', '.join(map(str, removed))}")
            before = resumed.reward_before if resumed else self._evaluate_start()
            for step in range(resumed.step if resumed else 0, config.steps):
                row = self.step(step)
                if config.eval.every and (step + 1) % config.eval.every == 0:
                    skipped = self._skipped
                    row["bytes_synced"] += self.publish()
                    row["syncs_skipped"] += self._skipped - skipped
                    row["eval_reward"] = self.evaluate(f"eval/{step}")
                report.step(row)
                refuse_gap(self.gaps[-1], config.rollout.max_logprob_gap)
                if config.checkpoint.every and ((step + 1) % config.checkpoint.every == 0 or step + 1 == config.steps):
                    self.save(step + 1, report, reward_before=before)
            self.publish()
            after = self.evaluate("eval/after")
            adapter = config.output / "adapter"
            exported = self.policy.export()
            on_first_rank(lambda: write_adapter(self._stamped(exported, config.steps), adapter, replace=True))
            worst = max(self.gaps, key=lambda one: one.maximum, default=None)
            report.finish(reward_before=before, reward_after=after, worst_gap=worst)
        return TrainingResult(output=config.output, adapter=adapter, reward_before=before, reward_after=after)

    def save(self, done: int, report: RunReport, *, reward_before: float) -> None:
        """Write a checkpoint after `done` steps, then remove those that are too old.

        Raises:
            LoraError: on every rank, when it cannot be written; the earlier ones stay.
        """
        assert self.start.identity is not None, "a run that writes checkpoints knows its identity"
        if self._published_at != self.policy.updates:
            # A run that resumes here publishes what it loads; so does this one, or the two would draw differently.
            self.policy.published.forget()
            self._compared_at = -1
        tensors = self.policy.checkpoint()
        state = RunState(
            format=1,
            step=done,
            updates=self.policy.updates,
            adapter_version=self.version,
            adapter_published=self._published_at == self.policy.updates,
            reward_before=reward_before,
            seconds=report.seconds,
            prompts=self.trained_on.hexdigest(),
            identity=self.start.identity,
            files={},
        )
        checkpoints, keep = CheckpointDirectory(self.config.output), self.config.checkpoint.keep
        assert keep is not None, "checkpoint.every fills it in"

        def write() -> None:
            report.sync()
            checkpoints.prepare()
            stamped = replace(tensors, adapter=self._stamped(tensors.adapter, done))
            write_checkpoint(checkpoints.place(done), stamped, state)
            checkpoints.prune(keep)

        on_first_rank(write)

    def step(self, step: int) -> dict[str, Any]:
        """One training step; returns its row of metrics, the same on every rank."""
        algorithm, phase = self.config.algorithm, PhaseTimer()
        skipped = self._skipped
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
        self.gaps.append(self._gap(step, reports, stats.values()["logprob_gap_mean"], rollouts))
        drawn = sum(len(one.completion.token_ids) for one in rollouts)
        return {
            "step": step,
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "degenerate_share": degenerate_share(rewards),
            **stats.values(),
            "logprob_gap_worst": self.gaps[-1].values(),
            "grad_norm": sum(one.grad_norm for one in reports) / len(reports),
            "lr": learning_rate(step, steps=self.config.steps, optimizer=self.config.optimizer),
            "tokens": drawn,
            "completion_length": drawn / len(rollouts),
            "truncated_share": sum(one.completion.finish_reason == "length" for one in rollouts) / len(rollouts),
            "adapter_version": rollouts[0].completion.adapter_version,
            "bytes_synced": bytes_synced,
            "syncs_skipped": self._skipped - skipped,
            "seconds": phase.seconds,
        }

    def publish(self) -> int:
        """Make the adapter as it is now the engine's policy; returns the bytes sent, 0 when it is that already or has
        moved so little that the engine keeps what it has (`rollout.delta_skip`)."""
        if self._compared_at == self.policy.updates or self.config.rollout.train_only:
            return 0
        self._compared_at = self.policy.updates
        small = self.config.rollout.delta_skip
        if small and self.policy.published.largest_change() <= small:
            self._skipped += 1
            return 0
        self._published_at = self.policy.updates
        exported = self.policy.export()
        self.version += 1
        sent = self.engine.publish(self.version, exported.tensors, exported.config)
        if small:
            self.policy.published.remember()
        return sent

    def draw(self, step: int) -> list[list[Rollout]]:
        """The step's completions, one group per prompt."""
        algorithm = self.config.algorithm
        first = step * algorithm.prompts_per_step
        examples: list[Example] = list(self.prompts[first : first + algorithm.prompts_per_step])
        self.trained_on.update(examples)
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

    def _load(self) -> None:
        """What the start asks for, out of its checkpoint."""
        checkpoint, state = self.start.checkpoint, self.start.state
        if checkpoint is None or state is None:
            return
        saved = on_every_rank(lambda: read_checkpoint(checkpoint, state))
        if self.start.weights_only:
            self.policy.load_weights(saved.adapter)
            return
        self.policy.restore(saved, updates=state.updates)
        # The new engine has no adapter yet; an adapter that was published before gets its old stamp again.
        self.version = state.adapter_version - state.adapter_published
        self.trained_on.update(self.prompts[: state.step * self.config.algorithm.prompts_per_step])

    def _stamped(self, adapter: PeftAdapter, done: int) -> PeftAdapter:
        """The adapter after `done` steps with its base and its place in the run, for the meta file."""
        assert adapter.origin is not None, "export_adapter says where an adapter comes from"
        identity = self.start.identity
        origin = replace(
            adapter.origin,
            base_fingerprint=identity.base if identity else base_fingerprint(self.config.model.path),
            step=done,
            adapter_version=self.version,
        )
        return replace(adapter, origin=origin)

    def _evaluate_start(self) -> float:
        """Held-out reward before training: of the base, or of the adapter that training starts from."""
        if self.start.weights_only or self.config.warm_start.adapter is not None:
            self.publish()
        return self.evaluate("eval/before")

    def _gap(self, step: int, reports: list[UpdateReport], mean: float, rollouts: list[Rollout]) -> GapReport:
        """The step's gap and its worst token."""
        worst = worst_of(one.worst for one in reports)
        assert worst is not None, "every completion has a token"
        return gap_report(worst, step=step, mean=mean, rollouts=rollouts, encoder=self.encoder)

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
