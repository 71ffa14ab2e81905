"""Hook calls for one selected plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pluggy

from lora_plugins_sdk import defaults, hookspecs
from lora_plugins_sdk.architecture import Architecture, BaseWeight
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.errors import LoraError, raise_if_any
from lora_plugins_sdk.region import GRAD_SUM_GROUPS
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParamRow, SitePlan
from lora_plugins_sdk.trace import trace_if_asked

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_plugins_sdk.adapter import LoraAdapter
    from lora_plugins_sdk.base_tensors import BaseCheckpoint, BaseTensors
    from lora_plugins_sdk.parallel_run import ParallelRun
    from lora_plugins_sdk.peft_files import PeftAdapter

DEFAULTS_NAME = "sdk-defaults"


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the hooks, holds the SDK's defaults and traces calls when asked to."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(defaults, DEFAULTS_NAME)
    trace_if_asked(manager)
    return manager


@dataclass(frozen=True, kw_only=True)
class SelectedPlugin:
    """One architecture together with the plugin that brought it; every hook call goes through here.

    Args:
        name: the plugin's registered name.
        version: its distribution's version, empty when it was not installed as a package.
        architecture: the selected architecture.
        manager: holds this plugin, the defaults, and possibly others, which are not asked.
    """

    name: str
    version: str
    architecture: Architecture
    manager: pluggy.PluginManager

    def __post_init__(self) -> None:
        plugin = self.manager.get_plugin(self.name)
        assert plugin is not None, f"{self.name} is not registered"
        if hasattr(plugin, "lora_export_tensor") != hasattr(plugin, "lora_import_tensor"):
            raise LoraError(
                f"plugin {self.name!r}",
                reason="overrides only one of lora_export_tensor and lora_import_tensor, so no adapter could return",
                cure="implement both, each the inverse of the other",
            )

    @classmethod
    def of(cls, architecture: Architecture, plugin: Any = None) -> SelectedPlugin:
        """An architecture without packaging: with the defaults alone, or with a plugin object's overrides."""
        manager = new_manager()
        manager.register(plugin if plugin is not None else object(), architecture.name)
        return cls(name=architecture.name, version="", architecture=architecture, manager=manager)

    def _call(self, hook: str, **arguments: Any) -> Any:
        chosen = self.manager.get_plugin(self.name)
        keep = {id(chosen), id(defaults)}
        others = [
            plugin
            for plugin in self.manager.get_plugins()
            if id(plugin) not in keep and not getattr(plugin, "lora_observer", False)
        ]
        return self.manager.subset_hook_caller(hook, others)(**arguments)

    def validate_run(self, hf_config: Mapping[str, object], lora: LoraConfig, facts: RunFacts) -> None:
        """Raise one LoraError with everything that forbids this run."""
        answers = self._call(
            "lora_validate_run", architecture=self.architecture, hf_config=hf_config, lora=lora, facts=facts
        )
        raise_if_any(
            f"this run of {self.architecture.name} is not possible:",
            [one for found in answers for one in found],
        )

    def normalize_targets(self, hf_config: Mapping[str, object], lora: LoraConfig) -> frozenset[str]:
        """Full HF names of the projections to adapt."""
        return self._call("lora_normalize_targets", architecture=self.architecture, hf_config=hf_config, lora=lora)

    def complete_row(self, row: ParamRow, hf_config: Mapping[str, object], facts: RunFacts) -> ParamRow:
        """The row with its gradient-sum group, PEFT name and serving names.

        Raises:
            LoraError: the plugin names a group that does not exist.
        """
        group = self._call("lora_grad_sum_groups", row=row, facts=facts)
        if group not in ("none", *GRAD_SUM_GROUPS):
            raise LoraError(
                f"plugin {self.name!r}",
                reason=f"lora_grad_sum_groups answers {group!r} for {row.hf_module}, which is no group",
                cure=f"answer one of none, {', '.join(GRAD_SUM_GROUPS)}",
            )
        row = replace(row, grad_sum_group=None if group == "none" else group)
        row = replace(row, hf_name=self._call("lora_hf_name", row=row))
        return replace(row, serving_names=self._call("lora_serving_names", row=row, hf_config=hf_config))

    def attach_site(self, module: nn.Module, plan: SitePlan, lora: LoraConfig, run: ParallelRun) -> Any:
        """A removable handle on one patched host linear."""
        delta: Callable[..., Tensor] = self._call("lora_site_delta", plan=plan, run=run)
        return self._call("lora_attach_site", module=module, plan=plan, lora=lora, run=run, delta=delta)

    def export_tensor(self, row: ParamRow, tensor: Tensor) -> Mapping[str, Tensor]:
        """PEFT tensors of one full factor."""
        return self._call("lora_export_tensor", row=row, tensor=tensor)

    def import_tensor(self, row: ParamRow, tensors: Mapping[str, Tensor]) -> Tensor:
        """One full factor from PEFT tensors."""
        return self._call("lora_import_tensor", row=row, tensors=tensors)

    def read_adapter(self, hf_config: Mapping[str, object], saved: PeftAdapter) -> PeftAdapter:
        """A saved adapter under the names of an export."""
        return self._call("lora_read_adapter", architecture=self.architecture, hf_config=hf_config, saved=saved)

    def build_model(
        self,
        hf_config: Mapping[str, object],
        run: ParallelRun,
        dtype: torch.dtype,
        overrides: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """This rank's part of the base model.

        Raises:
            LoraError: the plugin builds no model.
        """
        model = self._call(
            "lora_build_model",
            architecture=self.architecture,
            hf_config=hf_config,
            run=run,
            dtype=dtype,
            overrides=dict(overrides or {}),
        )
        if model is None:
            raise LoraError(
                f"plugin {self.name!r}",
                reason="builds no base model (no lora_build_model)",
                cure="build the model in your trainer and call attach, or implement the hook",
            )
        return model

    def base_weights(self, hf_config: Mapping[str, object]) -> Sequence[BaseWeight]:
        """Every host tensor of the base and its HF sources."""
        return self._call("lora_base_weights", architecture=self.architecture, hf_config=hf_config)

    def base_tensors(self, hf_config: Mapping[str, object], stored: BaseTensors) -> BaseTensors:
        """A checkpoint's tensors as declared."""
        return self._call("lora_base_tensors", architecture=self.architecture, hf_config=hf_config, stored=stored)

    def published_base(self, base: BaseCheckpoint) -> BaseCheckpoint:
        """A base of transformers as it is published."""
        return self._call("lora_published_base", architecture=self.architecture, base=base)

    def after_attach(self, adapter: LoraAdapter) -> None:
        """Tell the observers."""
        self._call("lora_after_attach", adapter=adapter)

    def after_export(self, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
        """Tell the observers."""
        self._call("lora_after_export", tensors=tensors, config=config)

    def on_error(self, error: Exception, stage: str) -> None:
        """Tell the observers."""
        self._call("lora_on_error", error=error, stage=stage)
