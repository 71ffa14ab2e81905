"""The adapter lives in the parallel state of its host: the same shards, the same data parallel domain."""

from __future__ import annotations

from typing import Any

import pytest

from known_faults.stack_host import HF_CONFIG, StackModel, adapted
from lora_plugins_sdk import (
    Architecture,
    LoraConfig,
    LoraError,
    ParallelRun,
    Projection,
    RunFacts,
    SelectedPlugin,
    Site,
    SiteKind,
    attach,
)
from lora_plugins_sdk.testing import Layout, current_run, run_world


def _one_linear(kind: SiteKind) -> Architecture:
    down = Projection(hf="model.down_proj", in_dim="hidden_size", out_dim="hidden_size")
    site = Site(path="decoder.layers.0.linear_q_down_proj", kind=kind, projections=(down,))
    return Architecture(name="one_linear", model_types=("stack",), sites=(site,))


@pytest.mark.parametrize("kind", [SiteKind.COLUMN, SiteKind.ROW])
def test_an_adapter_of_another_parallel_size_is_refused(kind: SiteKind) -> None:
    """B7: adapters were built for other parallel sizes than the linears that carry them; match them or raise."""
    model = StackModel()
    plugin, lora = SelectedPlugin.of(_one_linear(kind)), LoraConfig(rank=2)
    with pytest.raises(LoraError, match=r"linear_q_down_proj: its weight has shape \(8, 8\).*parallel sizes"):
        attach(model, plugin, HF_CONFIG, lora, ParallelRun(facts=RunFacts(tp=2)))
    assert not any("lora" in name for name, _ in model.named_parameters())
    attach(model, plugin, HF_CONFIG, lora)


def buffers() -> tuple[list[str], list[str], int]:
    """Factors in the dense and in the expert gradient buffers, and over how many ranks the former are reduced."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    model: Any = StackModel()
    adapter = adapted(model, current_run())
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    chunk: Any = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    names = {parameter: name for name, parameter in adapter.named_parameters()}
    dense, expert = (
        sorted(names[parameter] for buffer in some for parameter in buffer.params)
        for some in (chunk.buffers, chunk.expert_parallel_buffers)
    )
    return dense, expert, chunk.buffers[0].data_parallel_group.size()


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_dense_factors_follow_the_dense_data_parallel_domain() -> None:
    """B6: gradients were reduced over another data parallel group than the base parameter's own."""
    for dense, expert, size in run_world(buffers, Layout(dp=2)):
        assert len(dense) == 6 and not expert and size == 2
