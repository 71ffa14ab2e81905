"""Native LoRA for Megatron-core models: a plugin declares each projection once, the SDK derives the rest.

Importing this package does not import torch; names that need it are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.adapter_schema import AdapterSchema
from lora_plugins_sdk.architecture import Architecture, BaseWeight
from lora_plugins_sdk.base_tensors import BaseCheckpoint, BaseTensors
from lora_plugins_sdk.block_layout import BlockLayout, Run
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import ModelDims, read_hf_config
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.fingerprint import base_fingerprint
from lora_plugins_sdk.hookspecs import HOOKSPEC_API, hookimpl
from lora_plugins_sdk.layers import LayerTypes, OnlyLayers
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.multimodal import Multimodal
from lora_plugins_sdk.pack import Concat, Pack, QueryGroups
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.selection import load_plugin
from lora_plugins_sdk.site import Projection, Site, SiteKind, Tied
from lora_plugins_sdk.table import ParameterTable, ParamRow, SitePlan, derive_table
from lora_plugins_sdk.targets import module_names

if TYPE_CHECKING:
    from lora_plugins_sdk.adam_moments import gather_adam_moments, load_adam_moments
    from lora_plugins_sdk.adapter import LoraAdapter, adapter_of, disable_adapters
    from lora_plugins_sdk.attachment import attach, detach
    from lora_plugins_sdk.base_weights import load_base_weights
    from lora_plugins_sdk.frozen_adapter import FrozenAdapter
    from lora_plugins_sdk.parallel_run import ParallelRun
    from lora_plugins_sdk.peft_export import export_adapter
    from lora_plugins_sdk.peft_files import PeftAdapter, read_adapter, write_adapter
    from lora_plugins_sdk.peft_import import import_adapter
    from lora_plugins_sdk.reduce import reduce_grads, reduce_grads_in_finalize

_NEEDS_TORCH = {
    "FrozenAdapter": "frozen_adapter",
    "LoraAdapter": "adapter",
    "ParallelRun": "parallel_run",
    "PeftAdapter": "peft_files",
    "adapter_of": "adapter",
    "attach": "attachment",
    "detach": "attachment",
    "disable_adapters": "adapter",
    "export_adapter": "peft_export",
    "gather_adam_moments": "adam_moments",
    "import_adapter": "peft_import",
    "load_adam_moments": "adam_moments",
    "load_base_weights": "base_weights",
    "read_adapter": "peft_files",
    "reduce_grads": "reduce",
    "reduce_grads_in_finalize": "reduce",
    "write_adapter": "peft_files",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)


__all__ = [
    "HOOKSPEC_API",
    "AdapterSchema",
    "Architecture",
    "BaseCheckpoint",
    "BaseTensors",
    "BaseWeight",
    "BlockLayout",
    "Concat",
    "Diagnostic",
    "FrozenAdapter",
    "LayerTypes",
    "LoraAdapter",
    "LoraConfig",
    "LoraError",
    "ModelDims",
    "Multimodal",
    "OnlyLayers",
    "Pack",
    "ParallelRun",
    "ParamRow",
    "ParameterTable",
    "PeftAdapter",
    "Projection",
    "QueryGroups",
    "Run",
    "RunFacts",
    "SelectedPlugin",
    "Site",
    "SiteKind",
    "SitePlan",
    "Tied",
    "adapter_of",
    "attach",
    "base_fingerprint",
    "derive_table",
    "detach",
    "disable_adapters",
    "export_adapter",
    "gather_adam_moments",
    "hookimpl",
    "import_adapter",
    "load_adam_moments",
    "load_base_weights",
    "load_plugin",
    "module_names",
    "raise_if_any",
    "read_adapter",
    "read_hf_config",
    "reduce_grads",
    "reduce_grads_in_finalize",
    "write_adapter",
]
