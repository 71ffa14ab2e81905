"""The fused norm and linear keeps Transformer Engine's contract for `return_layernorm_output`, with and without SP."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from lora_plugins_sdk.hosts.gpt import transformer_config
from lora_plugins_sdk.hosts.norm_linear import TorchLayerNormColumnParallelLinear
from lora_plugins_sdk.hosts.rms_norm import rms_norm
from lora_plugins_sdk.testing import Layout, current_run, run_world

SEQ, BATCH, IN, OUT, EPS = 8, 2, 6, 10, 1e-5
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)]


@dataclass(frozen=True, kw_only=True)
class Result:
    out: torch.Tensor
    normed: torch.Tensor
    dx: torch.Tensor
    weight_grad: torch.Tensor | None


def _tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "x": (SEQ, BATCH, IN),
        "weight": (OUT, IN),
        "norm": (IN,),
        "d_out": (SEQ, BATCH, OUT),
        "d_normed": (SEQ, BATCH, IN),
    }
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def _forward_and_backward(frozen: bool, return_normed: bool) -> Result:
    run, full = current_run(), _tensors()
    tp, rank, sp = run.facts.tp, run.tp_rank, run.facts.sequence_parallel
    model = dict(num_layers=1, hidden_size=IN, num_attention_heads=2, normalization="RMSNorm", layernorm_epsilon=EPS)
    config = transformer_config(run, dtype=torch.float64, model=model, overrides={})
    linear = TorchLayerNormColumnParallelLinear(
        IN, OUT, config=config, init_method=config.init_method, gather_output=False, bias=False, is_expert=False
    )
    assert linear.weight is not None
    linear.weight.data.copy_(full["weight"].chunk(tp)[rank])
    linear.layer_norm_weight.data.copy_(full["norm"])
    for parameter in linear.parameters():
        parameter.requires_grad_(not frozen)
    linear.return_layernorm_output = return_normed
    tokens = slice(rank * SEQ // tp, (rank + 1) * SEQ // tp) if sp else slice(None)
    x = full["x"][tokens].clone().requires_grad_(True)
    answer, bias = linear(x)
    assert bias is None
    out, normed = answer if return_normed else (answer, torch.zeros(()))
    loss = (out * full["d_out"].chunk(tp, dim=-1)[rank]).sum()
    if return_normed:
        # Without SP every rank adds the whole gradient: it would come out doubled if the linear summed it over TP.
        loss = loss + (normed * full["d_normed"][tokens]).sum()
    loss.backward()
    assert x.grad is not None
    return Result(out=out.detach(), normed=normed.detach(), dx=x.grad, weight_grad=linear.weight.grad)


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize("return_normed", [True, False], ids=["with normed", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_output_normed_input_and_dx(layout: Layout, return_normed: bool, frozen: bool) -> None:
    ranks = run_world(_forward_and_backward, layout, frozen, return_normed)
    full = _tensors()
    x = full["x"].clone().requires_grad_(True)
    normed = rms_norm(x, full["norm"], EPS, zero_centered=False)
    out = normed @ full["weight"].T
    loss = (out * full["d_out"]).sum()
    if return_normed:
        loss = loss + (normed * full["d_normed"]).sum()
    loss.backward()

    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(torch.cat([one.out for one in ranks], dim=-1), out.detach())
    split = layout.sequence_parallel
    dx = torch.cat([one.dx for one in ranks]) if split else ranks[0].dx
    close(dx, x.grad)
    if return_normed:
        got = torch.cat([one.normed for one in ranks]) if split else ranks[0].normed
        close(got, normed.detach())
    assert all((one.weight_grad is None) == frozen for one in ranks)
