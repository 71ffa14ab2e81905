"""The two linears of a gated MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lora_plugins_sdk.hosts.torch_backend import spec_provider


def column_linear(config: Any, width: int, tp_group: Any, *, norm: bool) -> nn.Module:
    """Hidden state to `width`, split over TP; with `norm`, the norm of its input inside."""
    provider = spec_provider()()
    kind = provider.column_parallel_layer_norm_linear() if norm else provider.column_parallel_linear()
    assert kind is not None
    return kind(
        config.hidden_size,
        width,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name="fc1",
        tp_group=tp_group,
    )


def row_linear(config: Any, width: int, tp_group: Any) -> nn.Module:
    """`width`, split over TP, to the hidden state."""
    return spec_provider()().row_parallel_linear()(
        width,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name="fc2",
        tp_group=tp_group,
    )


def gated(both: Tensor) -> Tensor:
    """`[..., gate | up]` -> `silu(gate) * up`."""
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up
