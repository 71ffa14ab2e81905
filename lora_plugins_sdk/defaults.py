"""The SDK's own answers to the hooks: an ordinary plugin whose implementations come last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.architecture import Architecture, BaseWeight
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import Diagnostic, LoraError
from lora_plugins_sdk.hookspecs import hookimpl
from lora_plugins_sdk.layers import layers_with, number_of_layers
from lora_plugins_sdk.peft_names import factor_name
from lora_plugins_sdk.run import RunFacts, needless_expert_sizes, needless_for_experts
from lora_plugins_sdk.serving.sglang_places import family_of, serving_name
from lora_plugins_sdk.site import EXPERT, Site, SiteKind, packed_name
from lora_plugins_sdk.stacks import from_stack, to_stack
from lora_plugins_sdk.table import ParamRow, SitePlan, site_layout
from lora_plugins_sdk.targets import module_names, normalize_targets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lora_plugins_sdk.base_tensors import BaseCheckpoint, BaseTensors
    from lora_plugins_sdk.parallel_run import ParallelRun
    from lora_plugins_sdk.peft_files import PeftAdapter


@hookimpl(trylast=True)
def lora_validate_run(
    architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig, facts: RunFacts
) -> Iterable[Diagnostic]:
    """Sizes that cannot be split as asked."""
    dims = architecture.dims(hf_config)
    layers = number_of_layers(dims, architecture.num_layers)
    found = []
    if layers % facts.pp:
        found.append(
            Diagnostic(
                subject=f"pipeline parallel size {facts.pp}",
                reason=f"does not divide the model's {layers} layers",
                cure=f"use a pipeline parallel size that divides {layers}",
            )
        )
    if not any(site.experts for site in architecture.sites):
        found += _needless(lora, facts)
    for site in architecture.sites:
        if not layers_with(site.path, site.layers, dims, layers):
            continue  # no layer of this model has it
        try:
            site_layout(site, dims, facts)
        except LoraError as error:
            found += [one for one in error.diagnostics if one not in found]
        found += [one for one in _expert_problems(site, dims, facts) if one not in found]
    return found


def _needless(lora: LoraConfig, facts: RunFacts) -> Iterator[Diagnostic]:
    """What only experts need, asked for where there are none."""
    yield from needless_expert_sizes(facts)
    if lora.expert_sharing != "none":
        yield needless_for_experts(f"expert_sharing {lora.expert_sharing!r}")


def _expert_problems(site: Site, dims: ModelDims, facts: RunFacts) -> Iterator[Diagnostic]:
    if site.experts is None:
        return
    count = dims.resolve(site.experts)
    if count < 1 or count % facts.ep:
        yield Diagnostic(
            subject=f"expert parallel size {facts.ep}",
            reason=f"does not divide the model's {count} experts",
            cure=f"use an expert parallel size that divides {count}",
        )
    if facts.tp > 1 and not facts.sequence_parallel:
        yield Diagnostic(
            subject=f"tensor parallel size {facts.tp} without sequence parallelism",
            reason="every rank would dispatch the same tokens to the experts, and megatron-core refuses to train so",
            cure="set sequence_parallel, or use tensor parallel size 1",
        )


@hookimpl(trylast=True, specname="lora_normalize_targets")
def default_targets(architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig) -> frozenset[str]:
    """Match the targets against the sites."""
    return normalize_targets(architecture, hf_config, lora)


@hookimpl(trylast=True)
def lora_grad_sum_groups(row: ParamRow, facts: RunFacts) -> str:
    """What the region derived."""
    return row.grad_sum_group or "none"


@hookimpl(trylast=True)
def lora_hf_name(row: ParamRow) -> str:
    """PEFT's scheme: wrapper prefix, module path, `lora_A` or `lora_B`, `weight`; `lora_embedding_A` or `_B` alone for
    an embedding.
    """
    module = packed_name(row.hf_module) if row.packed else row.hf_module
    return factor_name(module, row.factor, embedding=row.embedding)


@hookimpl(trylast=True)
def lora_serving_names(row: ParamRow, hf_config: Mapping[str, object]) -> Mapping[str, str]:
    """The name in an export for SGLang; none where SGLang serves no LoRA."""
    name = serving_name(row.hf_name, family_of(hf_config))
    return {} if name is None else {"sglang": name}


@hookimpl(trylast=True)
def lora_site_delta(plan: SitePlan, run: ParallelRun) -> Callable[..., Tensor]:
    """The branch by kind; none where every adapted projection is pinned."""
    if not plan.trained:
        return lambda output, *inputs: output
    from lora_plugins_sdk.branch import site_delta
    from lora_plugins_sdk.embedding_branch import embedding_delta
    from lora_plugins_sdk.expert_branch import expert_delta

    if plan.site.embedding:
        return embedding_delta(plan, run)
    return expert_delta(plan, run) if plan.site.experts else site_delta(plan, run)


@hookimpl(trylast=True)
def lora_attach_site(
    module: nn.Module, plan: SitePlan, lora: LoraConfig, run: ParallelRun, delta: Callable[..., Tensor]
) -> Any:
    """Factors as a submodule named `lora`, forward patched on the instance."""
    from lora_plugins_sdk.site_handle import SiteHandle

    return SiteHandle(module, plan, lora, run, delta)


@hookimpl(trylast=True)
def lora_export_tensor(row: ParamRow, tensor: Tensor) -> Mapping[str, Tensor]:
    """As it is, under its PEFT name; one tensor for each expert where the name has `{expert}`, packed for a stack."""
    if EXPERT in row.hf_name:
        return {row.hf_name.format(expert=number): one for number, one in enumerate(tensor)}
    return {row.hf_name: to_stack(row, tensor)}


@hookimpl(trylast=True)
def lora_import_tensor(row: ParamRow, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of that name; those of all experts, stacked, where the name has `{expert}`."""
    if EXPERT in row.hf_name:
        import torch

        return torch.stack([tensors[row.hf_name.format(expert=number)] for number in range(row.full_shape[0])])
    return from_stack(row, tensors[row.hf_name])


@hookimpl(trylast=True)
def lora_read_adapter(architecture: Architecture, hf_config: Mapping[str, object], saved: PeftAdapter) -> PeftAdapter:
    """From any of the architecture's schemas."""
    for schema in architecture.adapter_schemas:
        saved = schema.read(saved, _modules(architecture, hf_config))
    return saved


def _modules(architecture: Architecture, hf_config: Mapping[str, object]) -> Iterator[str]:
    # Asked for only where names are to be changed: a config that this plugin cannot read is no matter elsewhere.
    yield from module_names(architecture, hf_config)


@hookimpl(trylast=True)
def lora_base_weights(architecture: Architecture, hf_config: Mapping[str, object]) -> Sequence[BaseWeight]:
    """The sites' weights with the sites' packs, then the architecture's remaining tensors."""
    architecture = architecture.of_config(hf_config)
    from_sites = [
        BaseWeight(
            host=f"{site.path}.weight",
            hf=tuple(f"{projection.hf}.weight" for projection in site.projections),
            # An embedding's weight is `[in, out]`, and what is tied to it is the alias.
            pack=site.pack if site.kind is SiteKind.COLUMN or site.embedding else None,
            sections=tuple(projection.sections for projection in site.projections),
            split_columns=site.kind is SiteKind.ROW and not site.embedding,
            layers=site.layers,
            tied=None if site.embedding else site.tied,
        )
        for site in architecture.sites
        if not site.experts  # `expert_weights` reads theirs off the sites
    ]
    return [*from_sites, *architecture.base_weights]


@hookimpl(trylast=True)
def lora_base_tensors(architecture: Architecture, hf_config: Mapping[str, object], stored: BaseTensors) -> BaseTensors:
    """As they are stored."""
    return stored


@hookimpl(trylast=True)
def lora_published_base(base: BaseCheckpoint) -> BaseCheckpoint:
    """As it is: transformers writes it as it is published."""
    return base
