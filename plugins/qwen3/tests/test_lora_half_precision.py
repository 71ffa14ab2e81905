"""A bfloat16 model through megatron-core's wrapper: factors stay float32, the forward stays close."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_reference import FoldedModel
from qwen3_tiny import LORA, microbatches, positions
from qwen3_trainer import Factor, adapted_model, local, loss_of
from torch import Tensor

from lora_plugins_sdk import export_adapter, read_adapter, reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world


def in_bfloat16(checkpoint: Path, adapter: Path) -> tuple[Tensor, dict[Factor, Tensor]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    run = current_run()
    model, attached = adapted_model(checkpoint, adapter, run, dtype=torch.bfloat16)
    config: Any = model.config
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(config, model)
    )
    assert all(parameter.dtype == torch.float32 for parameter in attached.parameters())
    frozen = [parameter for parameter in wrapped.parameters() if not parameter.requires_grad]
    assert frozen and all(parameter.dtype == torch.bfloat16 for parameter in frozen)
    tokens = microbatches()[0]
    logits = wrapped(tokens[:, :-1], positions(tokens[:, :-1]), None)
    loss_of(logits, tokens[:, 1:], run).backward()
    wrapped.finish_grad_sync()
    reduce_grads([wrapped])
    saved = read_adapter(adapter).tensors
    exported = export_adapter(wrapped).tensors
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items()), "factors lost precision"
    return logits.detach().float(), local(attached, "main_grad")


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_factors_keep_their_precision(checkpoint: Path, adapter: Path, figure: Callable[[str, float], None]) -> None:
    """B35: an adapter cast with the model loses small updates."""
    ((logits, grads),) = run_world(in_bfloat16, Layout(), checkpoint, adapter)
    folded = FoldedModel(checkpoint, read_adapter(adapter).tensors, LORA.scale)
    tokens = microbatches()[0]
    expected = folded.logits(tokens[:, :-1])
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    relative = ((logits[..., : expected.shape[-1]] - expected).norm() / expected.norm()).item()
    figure("bfloat16 logits, relative", relative)
    assert relative < 0.05
    worst = 1.0
    for key, grad in grads.items():
        leaf = folded.leaf(*key)
        assert leaf.grad is not None
        worst = min(worst, torch.cosine_similarity(grad.flatten(), leaf.grad.flatten(), dim=0).item())
    figure("bfloat16 gradients, smallest cosine", worst)
    assert worst > 0.97
