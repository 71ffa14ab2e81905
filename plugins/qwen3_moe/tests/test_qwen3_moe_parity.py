"""The megatron-core model against transformers: logits in every kind of layout, and every gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_moe_tiny import (
    BATCH,
    CONFIG,
    OTHER,
    TOKENS,
    VOCABULARY,
    hf_model,
    make_checkpoint,
    save_tensors,
    tokens,
)
from torch import Tensor

from lora_plugins_sdk import load_base_weights, load_plugin, read_hf_config
from lora_plugins_sdk.testing import Layout, current_run, run_world

TOLERANCE = 1e-5
TP2_EP2 = Layout(tp=2, ep=2, etp=1, sequence_parallel=True)
CASES = [
    ("usual", Layout()),
    ("usual", Layout(tp=2, sequence_parallel=True)),
    ("usual", Layout(dp=2, ep=2)),
    ("usual", TP2_EP2),
    ("usual", Layout(pp=2)),
    ("other", Layout()),
    ("other", TP2_EP2),
    ("other", Layout(pp=2)),
]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A checkpoint, what transformers computes from it, and every gradient as a directory of the same names."""

    directory: Path
    gradients: Path
    upstream: Tensor
    logits: Tensor


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    """`usual`: one tensor per expert, as published and as transformers saves it. `other`: experts fused."""
    return {name: _base(tmp_path_factory.mktemp(name), name) for name in ("usual", "other")}


def _base(folder: Path, name: str) -> Base:
    directory = make_checkpoint(folder / "saved", {"usual": CONFIG, "other": OTHER}[name])
    model = hf_model(directory)
    if name == "other":
        tied = {"lm_head.weight"}
        fused = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        assert fused["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 40, 40)
        directory = save_tensors(folder / "fused", OTHER, fused)
    logits = model(tokens()).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)) / TOKENS
    (logits * upstream).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())
    return Base(
        directory=directory,
        gradients=save_tensors(folder / "gradients", read_hf_config(directory), gradients),
        upstream=upstream,
        logits=logits.detach(),
    )


def _step(directory: Path, gradients: Path, upstream: Tensor) -> dict[str, Any]:
    """Forward, backward of `(logits * upstream).sum()` and finalize: this rank's logits and its worst gradient."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run, plugin, hf_config = current_run(), load_plugin("qwen3_moe"), read_hf_config(directory)
    model, expected = (plugin.build_model(hf_config, run, torch.float32) for _ in range(2))
    load_base_weights(model, plugin, directory, run)
    load_base_weights(expected, plugin, gradients, run)
    config: Any = model.config
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    seen: list[Tensor] = []
    columns = -(-VOCABULARY // run.facts.tp)
    padded = torch.nn.functional.pad(upstream, (0, columns * run.facts.tp - VOCABULARY))

    def forward(data: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append(logits.detach().clone())
            return (logits * padded.split(columns, dim=-1)[run.tp_rank]).sum(), {}

        return stage(next(data), torch.arange(TOKENS).expand(BATCH, -1), None), loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([tokens()]),
        model=[ddp],
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    differences, entries = {}, 0
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        scale = max(wanted.abs().max().item(), 1e-3)
        differences[name] = (parameter.main_grad - wanted).abs().max().item() / scale  # type: ignore[attr-defined]
        entries += parameter.numel()
    return {"logits": seen[0] if seen else None, "gradients": differences, "entries": entries}


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_logits_and_every_gradient(
    name: str, layout: Layout, bases: dict[str, Base], figure: Callable[[str, float], None]
) -> None:
    """B23: whichever layers have experts, and however their weights are stored."""
    base = bases[name]
    ranks = run_world(_step, layout, base.directory, base.gradients, base.upstream)
    shards = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    for replica in (shards[start : start + layout.tp] for start in range(0, len(shards), layout.tp)):
        logits = torch.cat(replica, dim=-1)
        assert not logits[..., VOCABULARY:].any(), "padding rows of the output layer are zero"
        difference = (logits[..., :VOCABULARY] - base.logits).abs().max().item()
        figure(f"{name} {layout}: logits", difference)
        assert difference <= TOLERANCE
    if layout == Layout():
        every = sum(weight.numel() for weight in hf_model(base.directory).parameters())
        assert ranks[0]["entries"] == every, "no parameter of transformers is left out"
    worst = {key: value for rank in ranks for key, value in rank["gradients"].items()}
    key = max(worst, key=lambda one: worst[one])
    figure(f"{name} {layout}: gradients, relative, worst {key}", worst[key])
    assert worst[key] <= TOLERANCE, sorted(worst.items(), key=lambda one: -one[1])[:8]
