"""The torch reference host: Transformer Engine's module tree, parameter names and signatures in pure torch.

megatron-core 0.16 and 0.19 ask their backend for the same things; where their questions differ, the arguments below
accept both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from lora_plugins_sdk.hosts.attention import TorchCausalAttention
from lora_plugins_sdk.hosts.norm_linear import TorchLayerNormColumnParallelLinear
from lora_plugins_sdk.hosts.rms_norm import TorchRMSNorm


class TorchSpecProvider(BackendSpecProvider):
    """Which module the torch host uses for each part of a dense transformer layer."""

    def column_parallel_linear(self) -> type:
        """megatron-core's own; a frozen weight takes its path without a weight gradient."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """megatron-core's own; a frozen weight takes its path without a weight gradient."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Norms live inside the column-parallel linears, as with Transformer Engine."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and column-parallel linear in one module."""
        return TorchLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """RMSNorm in every place."""
        return TorchRMSNorm

    def core_attention(self) -> type:
        """Causal attention."""
        return TorchCausalAttention

    def activation_func(self) -> None:
        """No activation module: the MLP applies `config.activation_func`."""
        return None

    def grouped_mlp_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Expert layers are not part of this host."""
        raise NotImplementedError("the torch host builds dense layers only")


def spec_provider() -> type[BackendSpecProvider]:
    """Transformer Engine's provider where that is installed and CUDA is available, else the torch host's."""
    if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"):
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider
    return TorchSpecProvider


@contextmanager
def _transformer_engine_names(provider: type[BackendSpecProvider]) -> Iterator[None]:
    """Let megatron-core's layer specs find `provider` under the names by which they know Transformer Engine.

    Without Transformer Engine these names are missing in 0.16 and None in 0.19.
    """
    names = {"TESpecProvider": provider, "TENorm": provider().layer_norm()}
    before = {name: getattr(gpt_layer_specs, name) for name in names if hasattr(gpt_layer_specs, name)}
    for name, value in names.items():
        setattr(gpt_layer_specs, name, value)
    try:
        yield
    finally:
        for name in names:
            delattr(gpt_layer_specs, name)
        for name, value in before.items():
            setattr(gpt_layer_specs, name, value)


def decoder_block_spec(config: Any, **kwargs: Any) -> TransformerBlockSubmodules:
    """megatron-core's own decoder block spec for this pipeline stage, on the provider of this machine.

    Args:
        config: megatron-core's TransformerConfig.
        **kwargs: handed to `get_gpt_decoder_block_spec`.
    """
    with _transformer_engine_names(spec_provider()):
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, **kwargs)
