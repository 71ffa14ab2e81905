"""RMSNorm with Transformer Engine's parameter name and attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def norm_weight(size: int, config: Any) -> nn.Parameter:
    """A neutral norm weight of `[size]`: ones, or zeros where the gain is stored zero-centred.

    Under SP a rank sees its own tokens only; megatron-core sums the gradients of weights marked `sequence_parallel`.
    """
    assert config.normalization == "RMSNorm", f"the torch host has no {config.normalization}"
    fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = nn.Parameter(fill(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension (Zhang and Sennrich 2019).

    The gain is `weight`, or `1 + weight` if zero-centred.
    """
    gain = 1 + weight if zero_centered else weight
    return nn.functional.rms_norm(x, (x.shape[-1],), gain, eps)


class TorchRMSNorm(nn.Module):
    """RMSNorm over the last dimension; usable under SP and with a zero-centred gain.

    Args:
        config: megatron-core's TransformerConfig.
        hidden_size: width of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = norm_weight(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered_gamma)
