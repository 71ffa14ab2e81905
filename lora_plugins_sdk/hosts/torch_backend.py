"""The torch reference host: Transformer Engine's module tree, parameter names and signatures in pure torch.

megatron-core 0.16 and 0.19 ask their backend for the same things; where their questions differ, the arguments below
accept both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variant_specs
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.attention import TorchCausalAttention
from lora_plugins_sdk.hosts.delta_net import use_torch_delta_rule
from lora_plugins_sdk.hosts.grouped_linear import TorchColumnParallelGroupedLinear, TorchRowParallelGroupedLinear
from lora_plugins_sdk.hosts.norm_linear import TorchLayerNormColumnParallelLinear
from lora_plugins_sdk.hosts.rms_norm import TorchRMSNorm


class TorchSpecProvider(BackendSpecProvider):
    """Which module the torch host uses for each part of a transformer layer."""

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

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False) -> Any:
        """megatron-core's grouped experts on this host's grouped linears.

        Raises:
            LoraError: the config asks for another form of experts.
        """
        if not moe_use_grouped_gemm or moe_use_legacy_grouped_gemm:
            raise LoraError(
                "moe_grouped_gemm",
                reason="the torch reference host has grouped experts only",
                cure="set moe_grouped_gemm, and not moe_use_legacy_grouped_gemm",
            )
        linears = dict(linear_fc1=TorchColumnParallelGroupedLinear, linear_fc2=TorchRowParallelGroupedLinear)
        grouped = getattr(experts, "GroupedMLPSubmodules", None)
        if grouped is None:  # 0.16 wants a module and its parts, 0.19 a builder
            return experts.TEGroupedMLP, MLPSubmodules(**linears)
        return partial(experts.TEGroupedMLP, submodules=grouped(**linears))


def spec_provider() -> type[BackendSpecProvider]:
    """Transformer Engine's provider where that is installed and CUDA is available, else the torch host's."""
    if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"):
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider
    return TorchSpecProvider


@contextmanager
def _names(module: ModuleType, **names: Any) -> Iterator[None]:
    """Set names of a module, and put back what was there, or nothing."""
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)
        for name, value in before.items():
            setattr(module, name, value)


def decoder_block_spec(config: Any, **kwargs: Any) -> TransformerBlockSubmodules:
    """megatron-core's own decoder block spec for this pipeline stage, on the provider of this machine.

    Args:
        config: megatron-core's TransformerConfig; `experimental_attention_variant` chooses the hybrid spec.
        **kwargs: handed to megatron-core's function.
    """
    provider = spec_provider()
    with ExitStack() as stack:
        # The names by which the specs know Transformer Engine; without it they are missing in 0.16 and None in 0.19.
        stack.enter_context(_names(gpt_layer_specs, TESpecProvider=provider, TENorm=provider().layer_norm()))
        stack.enter_context(_names(variant_specs, TESpecProvider=provider))
        if config.experimental_attention_variant is None:
            return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, **kwargs)
        use_torch_delta_rule()
        return variant_specs.get_transformer_block_with_experimental_attention_variant_spec(config, **kwargs)
