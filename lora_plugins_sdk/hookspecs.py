"""The hooks a model plugin may implement. Only `lora_register_architectures` is needed; the rest override derived
defaults.

A hook is called for one selected plugin: its implementation first, then the SDK's default (a `trylast` plugin). Plugins
of other models are never asked. Observers (a plugin object with `lora_observer = True`) are asked always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_plugins_sdk.adapter import LoraAdapter
    from lora_plugins_sdk.architecture import Architecture, BaseWeight
    from lora_plugins_sdk.base_tensors import BaseCheckpoint, BaseTensors
    from lora_plugins_sdk.config import LoraConfig
    from lora_plugins_sdk.errors import Diagnostic
    from lora_plugins_sdk.parallel_run import ParallelRun
    from lora_plugins_sdk.peft_files import PeftAdapter
    from lora_plugins_sdk.run import RunFacts
    from lora_plugins_sdk.table import ParamRow, SitePlan

PROJECT = "lora_plugins"
HOOKSPEC_API = (1, 3)
"""Version of this file alone: a new hook or argument raises the second number, a removal the first."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- what there is ---------------------------------------------------------------------------------------------------


@hookspec
def lora_register_architectures() -> Sequence[Architecture]:  # type: ignore[empty-body]
    """Return the architectures this plugin serves. Called at discovery, without torch."""


# --- before anything is attached -------------------------------------------------------------------------------------


@hookspec
def lora_validate_run(
    architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig, facts: RunFacts
) -> Iterable[Diagnostic]:  # type: ignore[empty-body]
    """Return problems of this run; all plugins' findings are shown together and stop the launch.

    :param architecture: the selected architecture.
    :param hf_config: the model's HF config.
    :param lora: rank, scale and targets.
    :param facts: parallel sizes.
    """


@hookspec(firstresult=True)
def lora_normalize_targets(
    architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig
) -> frozenset[str] | None:
    """Return the full HF names of the projections to adapt. Default: match the targets against the sites.

    :param architecture: the selected architecture.
    :param hf_config: the model's HF config.
    :param lora: holds `target_modules`, `exclude_modules` and `scope`.
    """


@hookspec(firstresult=True)
def lora_grad_sum_groups(row: ParamRow, facts: RunFacts) -> str | None:
    """Return the group over which this factor's gradient is summed (`"tp"`; for experts `"etp"` or `"etp_ep"`), or
    `"none"`. Default: derived from the region.

    :param row: the factor; `row.grad_sum_group` holds the derived answer.
    :param facts: parallel sizes.
    """


@hookspec(firstresult=True)
def lora_hf_name(row: ParamRow) -> str | None:
    """Return the factor's tensor name in a PEFT adapter file. Default: PEFT's own scheme over the HF module path.

    :param row: the factor.
    """


@hookspec(firstresult=True)
def lora_serving_names(row: ParamRow, hf_config: Mapping[str, object]) -> Mapping[str, str] | None:
    """Return the factor's tensor name per serving engine; none for an engine that serves no LoRA there. `{expert}`
    stands for each expert's number, `{q,k,v}` for each of a factor's three tensors. It is shown and held unique; an
    export for SGLang names its tensors by itself. Default: those names.

    :param row: the factor; `row.hf_name` is set.
    :param hf_config: the model's HF config.
    """


# --- attaching and the branch ----------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def lora_site_delta(plan: SitePlan, run: ParallelRun) -> Callable[..., Tensor] | None:
    """Return the function that adds the branch to a base output, where a site's mathematics is odd. Default: by kind.

    The function is called as `delta(base_output, branch_input, factors)` and returns the adapted output; on a site
    with experts as `delta(base_output, branch_input, factors, m_splits)`.

    :param plan: the site with its rows and layout.
    :param run: ranks and groups.
    """


@hookspec(firstresult=True)
def lora_attach_site(
    module: nn.Module, plan: SitePlan, lora: LoraConfig, run: ParallelRun, delta: Callable[..., Tensor]
) -> Any | None:
    """Register the factors of one site on its host linear, patch its forward, return a removable handle.

    A replacement handle needs `factors`, `plan` and `remove()`. Default: `lora_plugins_sdk.site_handle.SiteHandle`.

    :param module: the host linear.
    :param plan: the site with its rows and layout.
    :param lora: rank, scale, dropout.
    :param run: ranks and groups.
    :param delta: what `lora_site_delta` answered.
    """


# --- leaving and entering --------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def lora_export_tensor(row: ParamRow, tensor: Tensor) -> Mapping[str, Tensor] | None:
    """Return one full factor as PEFT wants it. Default: `{row.hf_name: tensor}`. An override must bring
    `lora_import_tensor`.

    :param row: the factor.
    :param tensor: `row.full_shape`, rows in HF order.
    """


@hookspec(firstresult=True)
def lora_import_tensor(row: ParamRow, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return one full factor from an adapter's tensors: the inverse of `lora_export_tensor`.

    :param row: the factor.
    :param tensors: the adapter file; read from it only what `lora_export_tensor` wrote for this row.
    """


@hookspec(firstresult=True)
def lora_read_adapter(
    architecture: Architecture, hf_config: Mapping[str, object], saved: PeftAdapter
) -> PeftAdapter | None:
    """Return a saved adapter under the names that `lora_export_tensor` gives, where it has those of another schema that
    adapters of this model come in. Default: by `architecture.adapter_schemas`.

    :param architecture: the selected architecture.
    :param hf_config: the model's HF config.
    :param saved: tensors and config, not checked yet.
    """


# --- the base, for trainers that let the plugin build it -------------------------------------------------------------


@hookspec(firstresult=True)
def lora_build_model(
    architecture: Architecture,
    hf_config: Mapping[str, object],
    run: ParallelRun,
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
) -> nn.Module | None:
    """Return this rank's part of the base model, weights uninitialised.

    :param architecture: the selected architecture.
    :param hf_config: the model's HF config.
    :param run: ranks and groups.
    :param dtype: dtype of the weights and activations.
    :param overrides: values for the host's own config (for megatron-core, `TransformerConfig` fields).
    """


@hookspec(firstresult=True)
def lora_base_weights(architecture: Architecture, hf_config: Mapping[str, object]) -> Sequence[BaseWeight] | None:
    """Return every host tensor of the base and its HF sources. Default: the sites' own packs plus
    `architecture.base_weights`.

    :param architecture: the selected architecture.
    :param hf_config: the model's HF config.
    """


@hookspec(firstresult=True)
def lora_base_tensors(
    architecture: Architecture, hf_config: Mapping[str, object], stored: BaseTensors
) -> BaseTensors | None:
    """Return a checkpoint's tensors under the names and in the shapes that sites and base weights declare, where its
    files have others. Default: as they are stored.

    :param architecture: the selected architecture.
    :param hf_config: the model's HF config.
    :param stored: the tensors of the files, read part by part.
    """


@hookspec(firstresult=True)
def lora_published_base(architecture: Architecture, base: BaseCheckpoint) -> BaseCheckpoint | None:
    """Return a base as its publishers write it, where transformers writes another form: rollout engines may read the
    publishers' alone. transformers and `lora_base_tensors` must read what is returned. Default: as it is.

    :param architecture: the selected architecture.
    :param base: config and tensors of the language model alone, as transformers writes them.
    """


# --- observers -------------------------------------------------------------------------------------------------------


@hookspec
def lora_after_attach(adapter: LoraAdapter) -> None:
    """Called once the adapter is attached on this rank.

    :param adapter: the attached adapter.
    """


@hookspec
def lora_after_export(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Called after an adapter was gathered for export.

    :param tensors: full factors under their PEFT names.
    :param config: the PEFT adapter config.
    """


@hookspec
def lora_on_error(error: Exception, stage: str) -> None:
    """Called when a stage fails, before the error leaves the SDK.

    :param error: what was raised.
    :param stage: `"attach"`, `"export"` or `"import"`.
    """
