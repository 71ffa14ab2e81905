"""From an attached adapter to PEFT tensors and config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lora_plugins_sdk.adapter import LoraAdapter, Model, adapter_of
from lora_plugins_sdk.adapter_meta import AdapterOrigin
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.gather import gather_factors
from lora_plugins_sdk.peft_config import minimal_config
from lora_plugins_sdk.peft_files import PeftAdapter
from lora_plugins_sdk.site import packed_name
from lora_plugins_sdk.targets import candidates


def export_adapter(model: Model, base_model_name_or_path: str = "") -> PeftAdapter:
    """Gather the adapter in PEFT's terms on every rank. Collective over the TP, ETP, EP and PP groups.

    Tensors are bit-identical under every topology, and share no memory with the adapter's parameters.

    Args:
        model: the model an adapter is attached to.
        base_model_name_or_path: recorded in the config; PEFT loads the base from there when told nothing else.

    Raises:
        LoraError: no adapter is attached, overrides gave one name to two factors, or a factor holds NaN or infinite
            values.
    """
    adapter = adapter_of(model)
    try:
        tensors: dict[str, Any] = {}
        for row, full in gather_factors(adapter).items():
            for name, tensor in adapter.plugin.export_tensor(row, full).items():
                if name in tensors:
                    raise LoraError(
                        name,
                        reason="two factors are exported under this name",
                        cure="fix the plugin's lora_hf_name",
                    )
                tensors[name] = tensor
        raise_if_any("this adapter cannot be exported:", _not_finite(tensors))
        config = peft_config(adapter, base_model_name_or_path)
    except Exception as error:
        adapter.plugin.on_error(error, "export")
        raise
    adapter.plugin.after_export(tensors, config)
    return PeftAdapter(tensors=tensors, config=config, origin=_origin(adapter))


def _origin(adapter: LoraAdapter) -> AdapterOrigin:
    plugin = adapter.plugin
    return AdapterOrigin(plugin=plugin.name, plugin_version=plugin.version, table=adapter.table.logical_digest())


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> Iterator[Diagnostic]:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            yield Diagnostic(
                subject=name,
                reason="holds NaN or infinite values",
                cure="go back to an earlier checkpoint of the adapter, and train on with a lower learning rate",
            )


def peft_config(adapter: LoraAdapter, base_model_name_or_path: str = "") -> dict[str, Any]:
    """`adapter_config.json` with the keys that every PEFT version knows (`use_rslora` only when it is set)."""
    lora = adapter.table.lora
    config = {
        "base_model_name_or_path": base_model_name_or_path,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "r": lora.rank,
        "target_modules": _target_modules(adapter),
        "use_rslora": lora.use_rslora,
    }
    return minimal_config(config, ())


def _target_modules(adapter: LoraAdapter) -> list[str]:
    """Leaf names where every projection of that name is adapted, full paths where only some are."""
    adapted = {packed_name(row.hf_module) for row in adapter.table.rows}
    every: dict[str, set[str]] = {}
    for one in candidates(adapter.plugin.architecture, adapter.hf_config):
        every.setdefault(one.projection.leaf, set()).add(packed_name(one.hf))
    names: set[str] = set()
    for leaf, modules in every.items():
        names |= {leaf} if modules <= adapted else modules & adapted
    return sorted(names)
