"""This rank's part of the subject: base, adapter, and the passes through megatron-core's own schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.attachment import attach
from lora_plugins_sdk.base_weights import load_base_weights
from lora_plugins_sdk.hosts.context_parallel import zigzag_positions
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.peft_import import import_adapter
from lora_plugins_sdk.reduce import reduce_grads_in_finalize
from lora_plugins_sdk.testing.conformance.problem import Problem, peft_adapter
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import current_run


@dataclass(frozen=True, kw_only=True)
class Session:
    """A base with an adapter, wrapped for data parallelism as a trainer would.

    Args:
        model: this rank's stage.
        chunk: the same within megatron-core's DistributedDataParallel.
        adapter: what was attached.
    """

    model: nn.Module
    chunk: Any
    adapter: LoraAdapter

    @property
    def run(self) -> ParallelRun:
        """This rank's place."""
        return self.adapter.run


def build_base(
    subject: Subject, directory: Path, *, dtype: torch.dtype = torch.float32, overrides: Mapping[str, Any] | None = None
) -> Any:
    """This rank's stage of the base, its weights loaded."""
    model: Any = subject.selected.build_model(subject.hf_config, current_run(), dtype, overrides)
    load_base_weights(model, subject.selected, directory, current_run())
    return model


def start_session(
    subject: Subject,
    directory: Path,
    factors: Mapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Session:
    """Build, load, attach, import the factors (the initial ones when None), wrap.

    Args:
        subject: what is tested.
        directory: HF directory of the base.
        factors: full factors by `ParamRow.init_key`.
        dtype: of the base.
        overrides: fields of the host's own config, such as recompute.
        changes: other LoRA options than the subject's.
    """
    model = build_base(subject, directory, dtype=dtype, overrides=overrides)
    adapter = attach(model, subject.selected, subject.hf_config, subject.lora(**changes), current_run())
    if factors is not None:
        import_adapter(model, peft_adapter(subject, factors, **changes))
    return Session(model=model, chunk=wrap(model), adapter=adapter)


def wrap(model: Any) -> Any:
    """Wire the gradient sums in and wrap for data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    model.config.finalize_model_grads_func = finalize_model_grads
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    reduce_grads_in_finalize(chunk)
    return chunk


def run_pass(chunk: Any, run: ParallelRun, problem: Problem, *, backward: bool = True) -> list[Tensor]:
    """One pass over this rank's microbatches through megatron-core's schedule, reductions included.

    Returns:
        Local logits of each microbatch, `[samples, tokens here, padded vocabulary / tp]`; none before the last stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mine = range(run.dp_rank, problem.tokens.shape[0], run.facts.dp)
    vocabulary = problem.upstream.shape[-1]
    logits_seen: list[Tensor] = []

    positions = my_positions(run, problem.tokens.shape[-1])
    device = next(chunk.parameters()).device

    def forward(data: Iterator[int], stage: nn.Module) -> tuple[Tensor, Any]:
        index = next(data)
        tokens = problem.tokens[index][:, positions].to(device)

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits_seen.append(logits.detach().clone())
            width = logits.shape[-1]
            start = min(run.tp_rank * width, vocabulary)
            weights = problem.upstream[index][:, positions, start : start + width].to(logits)
            return (logits[..., : weights.shape[-1]] * weights).sum(), {}

        return stage(tokens, positions.to(device).expand_as(tokens), None), loss

    if backward:
        chunk.zero_grad_buffer()
    with torch.set_grad_enabled(backward):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine),
            model=[chunk],
            num_microbatches=len(mine),
            seq_length=problem.tokens.shape[-1],
            micro_batch_size=problem.tokens.shape[1],
            forward_only=not backward,
        )
    return logits_seen


def my_positions(run: ParallelRun, length: int) -> Tensor:
    """Positions of a sequence that this rank is given: all, or its share under context parallelism."""
    from megatron.core import parallel_state

    return zigzag_positions(length, parallel_state.get_context_parallel_rank(), run.facts.cp)


def forward_logits(model: nn.Module, problem: Problem) -> Tensor:
    """One process: logits `[microbatches, samples, tokens, vocabulary]` of a plain forward, without a schedule."""
    tokens = problem.tokens.to(next(model.parameters()).device)
    positions = torch.arange(tokens.shape[-1], device=tokens.device)
    with torch.no_grad():
        logits = [model(one, positions.expand_as(one), None) for one in tokens]
    return torch.stack(logits)[..., : problem.upstream.shape[-1]]
