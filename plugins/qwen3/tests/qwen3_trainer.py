"""What runs on each rank: a few steps of training through megatron-core's own schedule and gradient buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from qwen3_tiny import LORA, VOCABULARY, microbatches, positions
from torch import Tensor, nn

from lora_plugins_sdk import (
    LoraAdapter,
    LoraConfig,
    ParallelRun,
    attach,
    export_adapter,
    import_adapter,
    load_base_weights,
    load_plugin,
    read_adapter,
    read_hf_config,
    reduce_grads,
    reduce_grads_in_finalize,
)
from lora_plugins_sdk.testing import current_run

Factor = tuple[str, str]  # (HF module, "A" or "B")
STEPS, LEARNING_RATE = 3, 1e-3


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank saw.

    Args:
        place: (tp, pp, dp) rank.
        split: dimension that TP splits, per factor; -1 for none.
        logits: per microbatch `[b, s, padded vocabulary / tp]`, on the last stage.
        dx: per microbatch, gradient of the embedding's output `[s, b, h]` (SP: s / tp), on the first stage; scaled as
            in one process.
        grads: local gradient per factor after the first step's reductions.
        weights: local factor after each step.
        exported: adapter after the last step, as every rank gathered it.
    """

    place: tuple[int, int, int]
    split: dict[Factor, int]
    logits: list[Tensor]
    dx: list[Tensor]
    grads: dict[Factor, Tensor]
    weights: list[dict[Factor, Tensor]]
    exported: dict[str, Tensor]


def adapted_model(
    checkpoint: Path,
    adapter: Path | None,
    run: ParallelRun,
    lora: LoraConfig = LORA,
    *,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, LoraAdapter]:
    """Base from the checkpoint, adapter attached and, if given, loaded."""
    plugin, config = load_plugin(architecture="qwen3"), read_hf_config(checkpoint)
    model = plugin.build_model(config, run, dtype, overrides)
    load_base_weights(model, plugin, checkpoint, run)
    attached = attach(model, plugin, config, lora, run)
    if adapter is not None:
        import_adapter(model, read_adapter(adapter))
    return model, attached


def loss_of(logits: Tensor, labels: Tensor, run: ParallelRun) -> Tensor:
    """Mean cross entropy over a vocabulary that is split over TP, padding left out; megatron-core's own kernel."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    columns = torch.arange(logits.shape[-1]) + run.tp_rank * logits.shape[-1]
    masked = logits.float().masked_fill(columns >= VOCABULARY, -1e9)
    return vocab_parallel_cross_entropy(masked.transpose(0, 1).contiguous(), labels.t().contiguous()).mean()


def local(adapter: LoraAdapter, attribute: str) -> dict[Factor, Tensor]:
    """This rank's part of every factor's `data`, `grad` or `main_grad`."""
    found = {}
    for factors in adapter.factors():
        for row in factors.plan.rows:
            whole = getattr(factors.get_parameter(row.param), attribute)
            part = whole[row.stacked_at : row.stacked_at + row.local_shape[0]]
            found[row.hf_module, row.factor] = part.detach().clone()
    return found


class Watch:
    """Keeps the logits and the gradient of the embedding's output of every microbatch."""

    def __init__(self, model: nn.Module) -> None:
        self.logits: list[Tensor] = []
        self.hidden: list[Tensor] = []
        embedding = getattr(model, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(self._seen)

    def _seen(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Nobody asks for this gradient when the embedding is frozen.
        output = output if output.requires_grad else output.detach().requires_grad_(True)
        output.retain_grad()
        self.hidden.append(output)
        return output

    def dx(self, share: float) -> list[Tensor]:
        return [one.grad * share for one in self.hidden if one.grad is not None]


def train(
    checkpoint: Path,
    adapter_directory: Path,
    lora: LoraConfig = LORA,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> Report:
    """AdamW steps through `forward_backward_func`, `DistributedDataParallel` and the reduction in finalize."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run = current_run()
    overrides = dict(overrides or {}) | ({"variable_seq_lengths": True} if run.facts.pp > 1 else {})
    model, adapter = adapted_model(checkpoint, adapter_directory, run, lora, overrides=overrides)
    config: Any = model.config
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp_options or {})), model
    )
    config.finalize_model_grads_func = finalize_model_grads
    reduce_grads_in_finalize([ddp])
    if ddp.ddp_config.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = ddp.no_sync, ddp.start_grad_sync
    batches = microbatches()
    mine = batches[run.dp_rank :: run.facts.dp]
    watch = Watch(model)

    def forward(data: Iterator[Tensor], stage: nn.Module) -> tuple[Tensor, Any]:
        tokens = next(data)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            watch.logits.append(logits.detach().clone())
            return loss_of(logits, labels, run), {}

        return stage(inputs, positions(inputs), None), loss

    def step() -> None:
        ddp.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine),
            model=[ddp],
            num_microbatches=len(mine),
            seq_length=batches[0].shape[1] - 1,
            micro_batch_size=batches[0].shape[0],
            forward_only=False,
        )
        if ddp.ddp_config.use_distributed_optimizer:
            _gather_shards(ddp)

    trainable = adapter.parameters()
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE) if trainable else None
    weights: list[dict[Factor, Tensor]] = []
    first: dict[str, Any] = {}
    for _ in range(steps):
        step()
        if not weights:
            dx = watch.dx(len(mine) / len(batches))
            first = {"logits": list(watch.logits), "dx": dx, "grads": local(adapter, "main_grad")}
        if optimizer is not None:
            for parameter in trainable:
                parameter.grad = parameter.main_grad.clone()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        weights.append(local(adapter, "data"))
    return _report(adapter, first, weights, model)


def plain_backward(checkpoint: Path, adapter_directory: Path, lora: LoraConfig = LORA) -> Report:
    """The same gradients without megatron-core's schedule and buffers: backward, then `reduce_grads`."""
    run = current_run()
    model, adapter = adapted_model(checkpoint, adapter_directory, run, lora)
    watch = Watch(model)
    batches = microbatches()
    for tokens in batches:
        logits = model(tokens[:, :-1], positions(tokens[:, :-1]), None)
        watch.logits.append(logits.detach().clone())
        (loss_of(logits, tokens[:, 1:], run) / len(batches)).backward()
    reduce_grads(model)
    first = {"logits": watch.logits, "dx": watch.dx(1.0), "grads": local(adapter, "grad")}
    return _report(adapter, first, [], model)


def _report(
    adapter: LoraAdapter, first: dict[str, Any], weights: list[dict[Factor, Tensor]], model: nn.Module
) -> Report:
    run = adapter.run
    rows = [row for factors in adapter.factors() for row in factors.plan.rows]
    return Report(
        place=(run.tp_rank, run.pp_rank, run.dp_rank),
        split={(row.hf_module, row.factor): row.partition_dim for row in rows},
        logits=first["logits"],
        dx=first["dx"],
        grads=first["grads"],
        weights=weights,
        exported=dict(export_adapter(model).tensors),
    )


def _gather_shards(ddp: Any) -> None:
    """Distributed-optimizer buffers hold one reduced shard per rank; put the shards together."""
    for buffer in ddp.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // group.size()
            shard = bucket.grad_data[group.rank() * size : (group.rank() + 1) * size].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
