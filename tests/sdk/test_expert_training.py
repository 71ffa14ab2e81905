"""Training the factors of routed experts under every layout equals one process (B3, B4, B5, B6, B7, B12)."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from sdk_experts_host import HF_CONFIG, moe_model, moe_plugin, moe_tokens
from torch import Tensor

from lora_harness.trainer.optimizer import global_grad_norm
from lora_plugins_sdk import (
    LoraAdapter,
    LoraConfig,
    ParallelRun,
    PeftAdapter,
    adapter_of,
    attach,
    export_adapter,
    import_adapter,
    reduce_grads,
)
from lora_plugins_sdk.testing import Layout, current_run, run_world

pytestmark = pytest.mark.world

LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, etp=1, sequence_parallel=True),
    Layout(tp=2, etp=1, ep=2, sequence_parallel=True),
    Layout(dp=2, etp=2),
    Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    Layout(dp=4, ep=2),
    Layout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
]
STEPS = 3


def lora_of(sharing: str, rank: int) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=2.0 * rank, expert_sharing=sharing)


def start_adapter(lora: LoraConfig) -> PeftAdapter:
    """An adapter whose B's are not zero."""
    model = moe_model()
    attach(model, moe_plugin(), HF_CONFIG, lora)
    saved = export_adapter(model)
    generator = torch.Generator().manual_seed(8)
    tensors = {name: torch.randn(one.shape, generator=generator) * 0.3 for name, one in sorted(saved.tensors.items())}
    return PeftAdapter(tensors=tensors, config=saved.config)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every factor's gradient, whole, by PEFT name."""
    from lora_plugins_sdk.gather import gather_factors

    adapter = adapter_of(model)
    grads = gather_factors(adapter, lambda parameter: getattr(parameter, "main_grad", parameter.grad))  # type: ignore[arg-type,return-value]
    return {name: one for row, full in grads.items() for name, one in adapter.plugin.export_tensor(row, full).items()}


def by_marks(adapter: LoraAdapter, run: ParallelRun) -> float:
    """The gradient norm as megatron-core's optimizers count it: by two marks, over the experts' own model group."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    counted = [
        parameter.main_grad.square().sum()  # type: ignore[attr-defined]
        for parameter in adapter.parameters()
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
    ]
    total = torch.stack(counted).sum() if counted else torch.zeros(())
    torch.distributed.all_reduce(total, group=run.etp_ep_group)
    return total.sqrt().item()


def train(start: PeftAdapter, lora: LoraConfig) -> dict[str, Any]:
    """Three AdamW steps of this rank's part of the model in megatron-core's DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    run = current_run()
    model = moe_model(run)
    attach(model, moe_plugin(), HF_CONFIG, lora, run)
    initial = export_adapter(model).tensors
    import_adapter(model, start)
    adapter = adapter_of(model)
    host = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, calculate_per_token_loss=True)
    chunk: Any = DistributedDataParallel(host, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.05)
    mine = run.dp_rank * run.facts.tp + run.tp_rank
    first, norms = None, ()
    for step in range(STEPS):
        x, weight = (one.chunk(run.facts.stage_size)[mine] for one in moe_tokens(step))
        chunk.zero_grad_buffer()
        (chunk(x) * weight).sum().backward()
        chunk.finish_grad_sync()
        reduce_grads(chunk)
        if first is None:
            first, norms = gradients(chunk), (global_grad_norm(adapter.parameters(), run), by_marks(adapter, run))
        for parameter in adapter.parameters():
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
        optimizer.step()
        for parameter in adapter.parameters():
            parameter.grad = None
    place = {
        name: (run.etp_rank if parameter.partition_dim >= 0 else 0, run.ep_rank if parameter.shape[0] > 1 else 0)  # type: ignore[attr-defined]
        for name, parameter in adapter.named_parameters()
    }
    hashes = {
        (name, *place[name]): hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for name, parameter in adapter.named_parameters()
    }
    return {
        "initial": initial,
        "gradients": first,
        "norms": norms,
        "final": export_adapter(model).tensors,
        "hashes": hashes,
    }


def one_process(start: PeftAdapter, lora: LoraConfig) -> dict[str, Any]:
    """The same steps without anything parallel."""
    model = moe_model()
    adapter = attach(model, moe_plugin(), HF_CONFIG, lora)
    initial = export_adapter(model).tensors
    import_adapter(model, start)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.05)
    first = None
    for step in range(STEPS):
        x, weight = moe_tokens(step)
        optimizer.zero_grad()
        (model(x) * weight).sum().backward()
        first = first if first is not None else gradients(model)
        optimizer.step()
    return {"initial": initial, "gradients": first, "final": export_adapter(model).tensors}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp_min(1e-6)
        assert error <= bound, (name, error.item())


@pytest.mark.parametrize(("sharing", "rank"), [("none", 4), ("outer", 4), ("outer", 3)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_equals_one_process(layout: Layout, sharing: str, rank: int) -> None:
    """B3, B4: shared factors sum over the ranks that hold other experts, also in later steps; B5: initial values do not
    depend on the topology; B6: experts are reduced over their own domain; B7: ETP is the experts' own; B12: the
    gradient norm counts every element once; B23: expert numbers are model-wide.
    """
    lora = lora_of(sharing, rank)
    start = start_adapter(lora)
    alone = one_process(start, lora)
    seen = run_world(train, layout, start, lora)
    norm = sum(one.square().sum().item() for one in alone["gradients"].values()) ** 0.5
    hashes: dict[tuple[str, int, int], str] = {}
    for rank_seen in seen:
        assert all(torch.equal(rank_seen["initial"][name], one) for name, one in alone["initial"].items())
        assert_close(rank_seen["gradients"], alone["gradients"], 2e-5)
        assert_close(rank_seen["final"], alone["final"], 1e-4)
        assert rank_seen["norms"] == pytest.approx((norm, norm), rel=1e-5)
        for key, value in rank_seen["hashes"].items():
            assert hashes.setdefault(key, value) == value, f"replicas of {key} differ"


def test_every_factor_has_a_gradient_of_its_own() -> None:
    """The oracle itself: nothing is zero but the expert that no token chose."""
    lora = lora_of("none", 4)
    found = one_process(start_adapter(lora), lora)["gradients"]
    assert {".experts.3." in name for name, one in found.items() if not one.any()} == {True}
