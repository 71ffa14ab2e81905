"""Load a frozen base from a local HF directory: streaming, each rank its slices, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lora_plugins_sdk.adapter import Model, chunks_of
from lora_plugins_sdk.architecture import Architecture, BaseWeight
from lora_plugins_sdk.base_tensors import BaseTensors
from lora_plugins_sdk.block_layout import BlockLayout
from lora_plugins_sdk.dims import ModelDims, read_hf_config
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.expert_weights import (
    ExpertSource,
    expert_problems,
    expert_sources,
    load_expert_weights,
    local_expert_weights,
)
from lora_plugins_sdk.hf_tensors import HfTensors
from lora_plugins_sdk.host_modules import locate
from lora_plugins_sdk.host_rows import interleave
from lora_plugins_sdk.layers import layers_with, number_of_layers
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.multimodal import matching
from lora_plugins_sdk.pack import pads
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.shards import local_rows
from lora_plugins_sdk.stacks import side_by_side
from lora_plugins_sdk.targets import candidates
from lora_plugins_sdk.vocabulary_padding import padding_cure


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSource:
    """One host tensor of one layer: where it lives and what it is made of."""

    host: str
    hf: tuple[str, ...]
    weight: BaseWeight


def load_base_weights(
    model: Model,
    plugin: SelectedPlugin,
    hf_directory: str | Path,
    run: ParallelRun | None = None,
    *,
    hf_config: Mapping[str, object] | None = None,
) -> None:
    """Fill this rank's base parameters from a local HF directory.

    Args:
        model: this rank's model or its chunks, before wrapping; an attached adapter is left alone.
        plugin: declares which HF tensors make up which host tensor.
        hf_directory: `config.json` and `*.safetensors`.
        run: this rank's place; one process when None.
        hf_config: the config the model was built from; read from the directory when None.

    Raises:
        LoraError: nothing was written. Lists every HF tensor that is missing or left over, every host parameter without
            a source, every shape that does not fit.
    """
    run = run or ParallelRun.single()
    config = read_hf_config(hf_config if hf_config is not None else hf_directory)
    dims = plugin.architecture.dims(config)
    declared = plugin.base_weights(config)
    parameters = local_parameters(chunks_of(model), declared)
    experts = expert_sources(plugin.architecture, config)
    local_experts = local_expert_weights(chunks_of(model), experts)
    stored = HfTensors(hf_directory)
    try:
        files = side_by_side(plugin.base_tensors(config, stored), plugin.architecture, config)
        sources = list(base_sources(declared, dims, plugin.architecture.num_layers))
        unsourced = _unsourced(model, parameters, declared, sources, local_experts, run)
        raise_if_any(
            f"{hf_directory} does not fit this model:",
            [
                *_unaccounted(sources, experts, files, dims, plugin.architecture.left_alone),
                # A misspelt path shows in both ways; the first tells more.
                *(list(unsourced) or _unplaced(model, parameters, sources, dims, run)),
                *_wrong_shapes(plugin.architecture, config, sources, files),
                *expert_problems(experts, local_experts, files, run),
            ],
        )
        jobs = [
            (parameters[one.host], one, base_layout(one, files, dims, run)) for one in sources if one.host in parameters
        ]
        raise_if_any(f"{hf_directory} does not fit this model:", _misfits(jobs, files, run))
        with torch.no_grad():
            for parameter, source, layout in jobs:
                value = local_value(source, layout, files, run)
                # In single precision: the sum may need digits that the stored dtype lacks.
                parameter.copy_(value.float() + source.weight.offset if source.weight.offset else value)
            load_expert_weights(local_experts, files, run)
    finally:
        stored.close()


def base_sources(declared: Iterable[BaseWeight], dims: ModelDims, num_layers: str) -> Iterator[BaseSource]:
    for weight in declared:
        layers = layers_with(weight.host, weight.layers, dims, number_of_layers(dims, num_layers))
        alias = weight.tied.to if weight.tied is not None and dims.flag(weight.tied.when) else None
        for layer in layers:
            names = (alias,) if alias else tuple(name.format(layer=layer) for name in weight.hf)
            yield BaseSource(host=weight.host.format(layer=layer), hf=names, weight=weight)


def local_parameters(chunks: tuple[nn.Module, ...], declared: Sequence[BaseWeight]) -> dict[str, nn.Parameter]:
    """This rank's declared parameters under model-wide names."""
    leaves: dict[str, list[str]] = {}
    for weight in declared:
        owner, leaf = weight.host.rsplit(".", 1)
        leaves.setdefault(owner, []).append(leaf)
    found: dict[str, nn.Parameter] = {}
    for owner, names in leaves.items():
        for wide, (module, _) in locate(chunks, [owner]).items():
            own = dict(module.named_parameters(recurse=False))
            found |= {f"{wide}.{leaf}": own[leaf] for leaf in names if leaf in own}
    return found


def _unaccounted(
    sources: list[BaseSource],
    experts: list[ExpertSource],
    files: BaseTensors,
    dims: ModelDims,
    left_alone: Iterable[str],
) -> Iterator[Diagnostic]:
    needed = {name for source in sources for name in source.hf}
    needed |= {name for source in experts for name in source.names(files)}
    copies = {
        name
        for source in sources
        if source.weight.tied is not None and dims.flag(source.weight.tied.when)
        for name in source.weight.hf
    }
    for name in sorted(needed - files.names()):
        yield Diagnostic(
            subject=name,
            reason="is missing from the checkpoint",
            cure="use the complete checkpoint of this config",
        )
    known = {name for pattern in left_alone for name in matching(pattern, files.names())}
    for name in sorted(files.names() - needed - copies - known):
        yield Diagnostic(
            subject=name,
            reason="is in the checkpoint and has no place in the model",
            cure="use the checkpoint's own config and plugin",
        )


def _unsourced(
    model: Model,
    parameters: dict[str, nn.Parameter],
    declared: Sequence[BaseWeight],
    sources: list[BaseSource],
    experts: list[tuple[ExpertSource, dict[int, nn.Parameter]]],
    run: ParallelRun,
) -> Iterator[Diagnostic]:
    matched = {source.weight.host for source in sources if source.host in parameters}
    # With more than one pipeline stage, what this rank lacks may be another's.
    unmatched = [one.host for one in declared if one.host not in matched and not one.tied] if run.facts.pp == 1 else []
    misspelt = f" (declared, but not in the model: {', '.join(unmatched)})" if unmatched else ""
    covered = {id(parameter) for name, parameter in parameters.items() if name in {one.host for one in sources}}
    covered |= {id(parameter) for _, weights in experts for parameter in weights.values()}
    for chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            if id(parameter) not in covered and ".lora." not in f".{name}":
                yield Diagnostic(
                    subject=name,
                    reason="is a base parameter without a HF source",
                    cure=f"add the site it belongs to or correct that site's path{misspelt}; "
                    "if it belongs to none, declare it in the architecture's base_weights",
                )


def _unplaced(
    model: Model, parameters: dict[str, nn.Parameter], sources: list[BaseSource], dims: ModelDims, run: ParallelRun
) -> Iterator[Diagnostic]:
    """Declared tensors that the model has no parameter for: what the checkpoint has for them would be lost."""
    owners = {source.weight.host.rsplit(".", 1)[0] for source in sources}
    present = set(locate(chunks_of(model), owners))
    for source in sources:
        tied = source.weight.tied is not None and dims.flag(source.weight.tied.when)
        # With more than one pipeline stage, a module that this rank lacks may be another's.
        here = run.facts.pp == 1 or source.host.rsplit(".", 1)[0] in present
        if here and not tied and source.host not in parameters:
            yield Diagnostic(
                subject=source.host,
                reason=f"is declared for {', '.join(source.hf)}, and the model has no such parameter",
                cure="build the model with it (lora_build_model), or correct the declaration's host path",
            )


def _wrong_shapes(
    architecture: Architecture, config: Mapping[str, object], sources: list[BaseSource], files: BaseTensors
) -> Iterator[Diagnostic]:
    """Projections whose weight is not what the config says; a packed host weight would hide that in its total."""
    dims = architecture.dims(config)
    present = {name for source in sources for name in source.hf} & files.names()
    for source in sources:
        for name, parts in zip(source.hf, source.weight.sections, strict=False):
            rows = [dims.resolve(part) for part in parts]
            if rows and name in present and sum(rows) != files.shape(name)[0]:
                yield Diagnostic(
                    subject=name,
                    reason=f"has {files.shape(name)[0]} rows, the config gives sections of {rows}",
                    cure="use the checkpoint's own config.json",
                )
    for one in candidates(architecture, config):
        name = f"{one.hf}.weight"
        if name not in present:
            continue
        expected = (dims.resolve(one.projection.out_dim), dims.resolve(one.projection.in_dim))
        expected = expected[::-1] if one.site.embedding else expected
        if files.shape(name) != expected:
            yield Diagnostic(
                subject=name,
                reason=f"has shape {list(files.shape(name))}, the config gives {list(expected)}",
                cure="use the checkpoint's own config.json",
            )


def base_layout(source: BaseSource, files: BaseTensors, dims: ModelDims, run: ParallelRun) -> BlockLayout | None:
    if source.weight.pack is None:
        return None
    declared = source.weight.sections or ((),) * len(source.hf)
    sections = [
        [dims.resolve(part) for part in parts] or [files.shape(name)[0]]
        for name, parts in zip(source.hf, declared, strict=True)
    ]
    return source.weight.pack.resolve(dims, sections, run.facts.tp, run.facts.make_vocab_size_divisible_by)


def _misfits(
    jobs: list[tuple[nn.Parameter, BaseSource, BlockLayout | None]], files: BaseTensors, run: ParallelRun
) -> Iterator[Diagnostic]:
    for parameter, source, layout in jobs:
        shape = files.shape(source.hf[0])
        if layout is not None:
            shape = (layout.host_rows // run.facts.tp, *shape[1:])
        elif source.weight.split_columns:
            shape = (shape[0], shape[1] // run.facts.tp)
        if tuple(parameter.shape) != shape:
            cure = "build the model from the checkpoint's own config.json"
            if layout is not None and pads(source.weight.pack) and parameter.shape[1:] == shape[1:]:
                cure += f"; {padding_cure(len(parameter), layout.rows(0), run.facts)}"
            yield Diagnostic(
                subject=f"{source.host} {list(parameter.shape)}",
                reason=f"{', '.join(source.hf)} would give {list(shape)}",
                cure=cure,
            )


def local_value(source: BaseSource, layout: BlockLayout | None, files: BaseTensors, run: ParallelRun) -> torch.Tensor:
    """This rank's part of one host tensor, reading nothing else."""
    if layout is None:
        shape = files.shape(source.hf[0])
        if source.weight.split_columns:
            width = shape[1] // run.facts.tp
            return files.columns(source.hf[0], run.tp_rank * width, (run.tp_rank + 1) * width)
        return files.rows(source.hf[0], 0, shape[0])
    parts = []
    for index, name in enumerate(source.hf):
        sections = layout.split(index, run.facts.tp)
        parts.append(local_rows(sections, run.tp_rank, partial(files.rows, name)))
    return interleave(layout, run.facts.tp, parts)
