"""Column-parallel linear with the norm of its input inside, as Transformer Engine's LayerNormLinear."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from lora_plugins_sdk.hosts.rms_norm import norm_weight, rms_norm


class TorchLayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then column-parallel linear; parameters `layer_norm_weight` [in] and `weight` [out / tp, in].

    With the attribute `return_layernorm_output` set (as in Transformer Engine) forward returns `((out, normed), bias)`,
    where `normed` is this rank's normed input: [s / tp, b, in] under SP, not gathered. Gradients that come in through
    `normed` are added as they are: without SP, a consumer that is split over TP has to sum its part over TP itself.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.layer_norm_weight = norm_weight(input_size, config)
        self.return_layernorm_output = False

    def forward(self, input_: Tensor) -> tuple[Any, Tensor | None]:  # type: ignore[override]
        """[s, b, in] (SP: [s / tp, b, in]) -> ([s, b, out / tp], bias), or ((out, normed), bias)."""
        normed = rms_norm(input_, self.layer_norm_weight, self.eps, zero_centered=self.zero_centered_gamma)
        out, bias = super().forward(normed)
        return ((out, normed), bias) if self.return_layernorm_output else (out, bias)
