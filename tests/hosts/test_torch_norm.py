"""RMSNorm of the torch host against its formula in fp64."""

from types import SimpleNamespace

import pytest
import torch

from lora_plugins_sdk.hosts.cpu_shim import install_cpu_shim
from lora_plugins_sdk.hosts.rms_norm import TorchRMSNorm

install_cpu_shim()


def _config(*, zero_centered: bool, sequence_parallel: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=zero_centered,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float64,
    )


@pytest.mark.parametrize("zero_centered", [False, True])
def test_output_and_gradients_follow_the_formula(zero_centered: bool) -> None:
    torch.manual_seed(0)
    norm = TorchRMSNorm(_config(zero_centered=zero_centered), 6, eps=1e-3)
    norm.weight.data += 0.3 * torch.randn(6, dtype=torch.float64)
    x = torch.randn(4, 2, 6, dtype=torch.float64, requires_grad=True)
    out = norm(x)
    gain = norm.weight + 1 if zero_centered else norm.weight
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, norm.weight), upstream)
    theirs = torch.autograd.grad(expected, (x, norm.weight), upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_fresh_norm_has_gain_one(zero_centered: bool) -> None:
    norm = TorchRMSNorm(_config(zero_centered=zero_centered), 8, eps=0.0)
    out = norm(torch.randn(3, 8, dtype=torch.float64))
    torch.testing.assert_close(out.square().mean(-1), torch.ones(3, dtype=torch.float64))


def test_the_weight_is_marked_for_the_gradient_sum_under_sp() -> None:
    for sp in (True, False):
        norm = TorchRMSNorm(_config(zero_centered=False, sequence_parallel=sp), 8)
        assert getattr(norm.weight, "sequence_parallel", None) is sp
