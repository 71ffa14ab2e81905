"""megatron-core's gated delta net without flash-linear-attention (FLA), whose kernels need a GPU and Triton."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def has_fla() -> bool:
    """Whether FLA's kernels can be used: installed, and CUDA is there."""
    return torch.cuda.is_available() and importlib.util.find_spec("fla") is not None


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, as FLA's kernel and transformers compute it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def use_torch_delta_rule() -> None:
    """Let megatron-core build and run GatedDeltaNet without FLA; nothing changes where FLA can be used.

    The rule itself and the convolution are megatron-core's own in torch, chosen by `TransformerConfig`'s
    `deterministic_mode`.
    """
    if has_fla():
        return
    from megatron.core.ssm import gated_delta_net

    # 0.19 made the module a package; its layer looks the names up in `common`.
    module = getattr(gated_delta_net, "common", gated_delta_net)
    # Obstacle: the constructor refuses to build without FLA, whichever rule the config chooses.
    module.HAVE_FLA = True
    # Obstacle: the norm of queries and keys is FLA's alone.
    module.l2norm = l2_norm
