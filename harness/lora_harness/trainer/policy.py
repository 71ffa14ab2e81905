"""The policy in training: megatron-core runs forward and backward, the SDK's adapter is all that learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lora_harness.batch import Microbatch, StepBatch, microbatches
from lora_harness.checkpoint.files import Checkpoint
from lora_harness.logprobs import TokenLogProbs, token_logprobs
from lora_harness.losses import LossOptions, logprob_gap, policy_loss
from lora_harness.parity import WorstToken, worst_of, worst_token
from lora_harness.ranks import on_every_rank
from lora_harness.token_stats import TokenStats
from lora_harness.trainer.build import build_policy
from lora_harness.trainer.optimizer import AdapterOptimizer
from lora_harness.trainer.published import PublishedFactors
from lora_plugins_sdk import (
    FrozenAdapter,
    ParallelRun,
    PeftAdapter,
    disable_adapters,
    export_adapter,
    gather_adam_moments,
    import_adapter,
    load_adam_moments,
    read_adapter,
)

if TYPE_CHECKING:
    from lora_harness.config import TrainConfig

# What a microbatch's forward pass leaves behind on the last stage.
_LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """One optimizer update.

    Args:
        stats: token statistics over the whole update, the same on every rank.
        grad_norm: global gradient norm before clipping.
        worst: token on which trainer and engine differ most, the same on every rank; None over no token.
    """

    stats: TokenStats
    grad_norm: float
    worst: WorstToken | None


class MegatronPolicy:
    """The policy, its reference (the base, alone or with the frozen warm-start adapter) and its optimizer.

    Args:
        config: the training config.
        run: this rank's place.

    Attributes:
        updates: optimizer updates made so far.
        published: the factors that the engine has.

    Raises:
        LoraError: the model, its weights or the adapter cannot be had, or the warm-start adapter does not fit.
    """

    def __init__(self, config: TrainConfig, run: ParallelRun) -> None:
        self._config = config
        self._run = run
        self._built = build_policy(config, run)
        self._optimizer = AdapterOptimizer(self._built.adapter.parameters(), config.optimizer, run)
        self.updates = 0
        self.published = PublishedFactors(self._built.adapter.parameters())
        self._frozen: FrozenAdapter | None = None
        if config.warm_start.adapter is not None:
            self.load_weights(on_every_rank(partial(read_adapter, config.warm_start.adapter)))
            if config.warm_start.reference == "warm_start":
                self._frozen = FrozenAdapter(self._built.chunk)
        self._last_stage = run.pp_rank == run.facts.pp - 1
        self._options = LossOptions(
            norm=config.algorithm.loss_norm,
            clip_low=config.algorithm.clip_low,
            clip_high=config.algorithm.clip_high,
            kl_coef=config.algorithm.kl_coef,
            kl_estimator=config.algorithm.kl_estimator or "k3",
        )

    @property
    def trained_parameters(self) -> int:
        """Number of adapter parameters of the whole model."""
        return sum(math.prod(row.full_shape) for row in self._built.adapter.table.rows if not row.pinned)

    @property
    def pinned_modules(self) -> tuple[str, ...]:
        """Targets that the run holds at zero, since its engine cannot serve them."""
        return self._built.adapter.table.lora.pinned_modules

    def export(self) -> PeftAdapter:
        """The adapter in PEFT's terms, on every rank. Collective."""
        return export_adapter(self._built.chunk, base_model_name_or_path=str(self._config.model.path))

    def load_weights(self, saved: PeftAdapter) -> None:
        """Make `saved` the adapter; the optimizer and the reference stay as they are. Collective over all ranks.

        The factors are fp32 and the optimizer steps on them directly: there is no second copy to refresh.

        Raises:
            LoraError: it does not fit; nothing was changed.
        """
        on_every_rank(lambda: import_adapter(self._built.chunk, saved))

    def checkpoint(self) -> Checkpoint:
        """The adapter and its moments in full form, on every rank. Collective over all ranks.

        Raises:
            LoraError: on every rank, when one trains more than the adapter.
        """
        adapter = self._built.adapter
        on_every_rank(adapter.refuse_other_trainable)
        return Checkpoint(adapter=self.export(), moments=gather_adam_moments(adapter, self._optimizer.adamw))

    def restore(self, saved: Checkpoint, *, updates: int) -> None:
        """Continue where a checkpoint was made, under this run's topology. Collective over all ranks.

        Args:
            saved: its tensors.
            updates: optimizer updates that it has seen, 1 or more.

        Raises:
            LoraError: it does not fit.
        """
        self.load_weights(saved.adapter)
        on_every_rank(
            lambda: load_adam_moments(self._built.adapter, self._optimizer.adamw, saved.moments, step=updates)
        )
        self.updates = updates

    def logprobs(self, batch: StepBatch, *, reference: bool) -> Tensor:
        """Log-probabilities of all targets of a step, without gradients. Collective.

        Args:
            batch: the step's sequences.
            reference: of the reference, else of the policy.

        Returns:
            [N, S] fp32 on the last pipeline stage, 0 on the others.
        """
        result = torch.zeros(batch.inputs.shape, device=batch.inputs.device)
        rows = range(len(batch.inputs))
        with torch.no_grad(), self._as_reference() if reference else nullcontext():
            for micro, left in self._run_schedule(batch, rows, self._keep_logprobs, forward_only=True):
                result[micro.rows[~micro.filler]] = left["logprobs"][~micro.filler]
        if self._last_stage and self._run.facts.dp > 1:
            # Each data parallel rank filled its own rows; a later update may deal them out differently.
            dist.all_reduce(result, group=self._run.dp_group)
        return result

    def update(
        self,
        batch: StepBatch,
        rows: Sequence[int],
        *,
        normaliser: float,
        lr: float,
        ref_logprobs: Tensor,
        old_logprobs: Tensor | None,
    ) -> UpdateReport:
        """One optimizer update on some rows of a step. Collective over all ranks.

        Args:
            batch: the step's sequences.
            rows: the rows of this update, over all data parallel ranks.
            normaliser: `loss_normaliser` of these rows.
            lr: learning rate.
            ref_logprobs: [N, S] of the reference, as `logprobs` returns them.
            old_logprobs: [N, S] of the policy before the step's first update; None in a step with one update.
        """
        self._built.chunk.zero_grad_buffer()
        loss = partial(self._policy_loss, normaliser=normaliser, ref=ref_logprobs, old=old_logprobs)
        left = list(self._run_schedule(batch, rows, loss, forward_only=False))
        grad_norm = self._optimizer.step(lr)
        self.updates += 1
        stats, worst = self._share([one["stats"] for _, one in left], worst_of(one["worst"] for _, one in left))
        return UpdateReport(stats=stats, grad_norm=grad_norm, worst=worst)

    def _as_reference(self) -> AbstractContextManager[None]:
        return disable_adapters(self._built.chunk) if self._frozen is None else self._frozen.active()

    def _run_schedule(
        self,
        batch: StepBatch,
        rows: Sequence[int],
        loss: Callable[[StepBatch, Microbatch, int, TokenLogProbs], tuple[Tensor, dict[str, Any]]],
        *,
        forward_only: bool,
    ) -> Iterator[tuple[Microbatch, dict[str, Any]]]:
        """Run megatron-core's schedule; on the last stage yield what `loss` left for each microbatch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        micros = microbatches(
            rows, rank=self._run.dp_rank, ranks=self._run.facts.dp, size=self._config.parallel.micro_batch_size
        )

        def forward_step(iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, _LossFunction]:
            micro = next(iterator)
            inputs = batch.inputs[micro.rows]
            positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
            output = model(inputs, positions, None)

            def loss_of(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
                values = token_logprobs(
                    logits,
                    batch.targets[micro.rows],
                    vocab_size=self._built.vocab_size,
                    temperature=self._config.rollout.temperature,
                    tp_group=self._run.tp_group if self._run.facts.tp > 1 else None,
                )
                return loss(batch, micro, len(micros), values)

            return output, loss_of

        left = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self._built.chunk],
            num_microbatches=len(micros),
            seq_length=batch.inputs.shape[1],
            micro_batch_size=len(micros[0].rows),
            forward_only=forward_only,
        )
        return zip(micros, left, strict=True) if self._last_stage else iter(())

    def _keep_logprobs(
        self, batch: StepBatch, micro: Microbatch, count: int, values: TokenLogProbs
    ) -> tuple[Tensor, dict[str, Any]]:
        return values.logprobs.sum(), {"logprobs": values.logprobs.detach()}

    def _policy_loss(
        self,
        batch: StepBatch,
        micro: Microbatch,
        count: int,
        values: TokenLogProbs,
        *,
        normaliser: float,
        ref: Tensor,
        old: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = batch.mask[micro.rows] & ~micro.filler[:, None].to(batch.mask.device)
        before = old[micro.rows] if old is not None else None
        loss, stats = policy_loss(
            values.logprobs,
            advantages=batch.advantages[micro.rows],
            mask=mask,
            normaliser=normaliser,
            options=self._options,
            old_logprobs=before,
            ref_logprobs=ref[micro.rows],
            entropy=values.entropy,
        )
        drawn_by = values.logprobs if before is None else before
        engine = batch.rollout_logprobs[micro.rows]
        gap = logprob_gap(drawn_by, engine, mask)
        worst = worst_token(drawn_by, engine, mask, micro.rows)
        stats = TokenStats(tokens=stats.tokens, sums=stats.sums | gap.sums, maxima=gap.maxima)
        # megatron-core divides by the microbatches and averages over data parallel ranks; this is a share of a sum.
        return loss * count * self._run.facts.dp, {"stats": stats, "worst": worst}

    def _share(self, stats: list[TokenStats], worst: WorstToken | None) -> tuple[TokenStats, WorstToken | None]:
        """Statistics and worst token of the update on every rank: taken over data parallel ranks, told to the other
        stages."""
        total: list[tuple[TokenStats, WorstToken | None] | None] = [None]
        if self._last_stage:
            summed = stats[0]
            for one in stats[1:]:
                summed = summed + one
            candidates: list[WorstToken | None] = [None] * self._run.facts.dp
            dist.all_gather_object(candidates, worst, group=self._run.dp_group)
            total = [(summed.all_reduce(self._run.dp_group), worst_of(candidates))]
        if self._run.facts.pp > 1:
            assert self._run.pp_group is not None
            last = dist.get_global_rank(self._run.pp_group, self._run.facts.pp - 1)
            dist.broadcast_object_list(total, src=last, group=self._run.pp_group)
        assert total[0] is not None
        return total[0]
