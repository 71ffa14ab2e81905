"""The torch host's grouped linear against one plain linear per expert, its names, and uneven gathering."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.cpu_shim import install_cpu_shim
from lora_plugins_sdk.hosts.delta_net import l2_norm
from lora_plugins_sdk.hosts.grouped_linear import TorchColumnParallelGroupedLinear, TorchRowParallelGroupedLinear
from lora_plugins_sdk.hosts.torch_backend import TorchSpecProvider
from lora_plugins_sdk.hosts.uneven import gather_uneven
from lora_plugins_sdk.testing import Layout, run_world

install_cpu_shim()


def _grouped(kind: type, *, ranks: int = 1, bias: bool = False) -> Any:
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: ranks))
    config = SimpleNamespace(params_dtype=torch.float64)
    return kind(3, 6, 10, config=config, init_method=torch.nn.init.normal_, bias=bias, pg_collection=groups, name="fc")


@pytest.mark.parametrize("splits", [[4, 0, 3], [0, 0, 0], [0, 0, 5]])
def test_each_token_meets_its_expert(splits: list[int]) -> None:
    linear = _grouped(TorchColumnParallelGroupedLinear)
    assert [name for name, _ in linear.named_parameters()] == ["weight0", "weight1", "weight2"]
    x = torch.randn(sum(splits), 6, dtype=torch.float64, requires_grad=True)
    out, bias = linear(x, splits)
    expert = torch.arange(3).repeat_interleave(torch.tensor(splits))
    weights = torch.stack(list(linear.parameters()))
    expected = torch.einsum("ti,toi->to", x, weights[expert])
    assert bias is None and out.shape == (sum(splits), 10)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*[torch.autograd.grad(one, x, upstream)[0] for one in (out, expected)])


@pytest.mark.parametrize(
    ("kind", "shape"), [(TorchColumnParallelGroupedLinear, (5, 6)), (TorchRowParallelGroupedLinear, (10, 3))]
)
def test_expert_tensor_parallelism_splits_one_side(kind: type, shape: tuple[int, int]) -> None:
    linear = _grouped(kind, ranks=2)
    assert {tuple(weight.shape) for weight in linear.parameters()} == {shape}
    assert {weight.partition_dim for weight in linear.parameters()} == {kind.split_dim}  # type: ignore[attr-defined]
    # B6: left to the plain data parallel group, the gradients of experts that are laid out apart would not be summed.
    assert {weight.allreduce for weight in linear.parameters()} == {False}


def test_what_is_refused() -> None:
    with pytest.raises(LoraError, match="expert bias"):
        _grouped(TorchColumnParallelGroupedLinear, bias=True)
    with pytest.raises(LoraError, match="does not divide the experts' width 6"):
        _grouped(TorchRowParallelGroupedLinear, ranks=4)
    for arguments in ([False], [True, True]):
        with pytest.raises(LoraError, match="grouped experts only"):
            TorchSpecProvider().grouped_mlp_modules(*arguments)


def test_l2_norm_follows_its_formula() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(l2_norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def _gather() -> Tensor:
    import torch.distributed as dist

    rank = dist.get_rank()
    lengths = [3, 0]
    whole = torch.arange(6.0).view(3, 2)
    return gather_uneven(whole[: lengths[rank]], lengths, dist.group.WORLD)  # type: ignore[arg-type]


@pytest.mark.world
def test_parts_of_unequal_length_are_gathered() -> None:
    for gathered in run_world(_gather, Layout(dp=2)):
        assert torch.equal(gathered, torch.arange(6.0).view(3, 2))
