"""Attach an adapter to a model, and take it off again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk.adapter import LoraAdapter, Model, adapter_of, chunks_of, find_adapter, mark
from lora_plugins_sdk.agreement import Claim, agree, claim_of, place_on_stages
from lora_plugins_sdk.arguments import expect, expect_model
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.expert_host import refuse_sequential
from lora_plugins_sdk.host_modules import locate
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.site_handle import check_host
from lora_plugins_sdk.table import ParameterTable, derive_table
from lora_plugins_sdk.targets import candidates


def attach(
    model: Model,
    plugin: SelectedPlugin,
    hf_config: Mapping[str, object] | str | Path,
    lora: LoraConfig,
    run: ParallelRun | None = None,
) -> LoraAdapter:
    """Attach an adapter: freeze the base, register the factors, patch the linears. Collective over every rank of the
    run.

    Call it before wrapping the model (Float16Module, DistributedDataParallel): the wrappers must see the factors.

    Args:
        model: this rank's model, or its list of virtual pipeline chunks.
        plugin: the selected plugin (`load_plugin("qwen3")`, or `SelectedPlugin.of(architecture)`).
        hf_config: the model's HF config, as a mapping, a file or a directory.
        lora: rank, scale and targets.
        run: this rank's place; one process when None.

    Returns:
        The adapter; free functions such as `reduce_grads(model)` find it on the model.

    Raises:
        LoraError: nothing was changed. An argument of another type, a bad target or size, layers that the config does
            not have, a host module that is missing, of another shape or already adapted, a model without values or
            wrapped already, or ranks that disagree.
    """
    run = ParallelRun.single() if run is None else run
    expect_model(model)
    expect("plugin", plugin, SelectedPlugin, cure='select one: load_plugin("NAME") or SelectedPlugin.of(architecture)')
    expect(
        "hf_config",
        hf_config,
        (Mapping, str, Path),
        cure="give config.to_dict() of a transformers config" if hasattr(hf_config, "to_dict") else "give config.json",
    )
    expect("lora", lora, LoraConfig, cure="make one: LoraConfig(rank=..., alpha=...)")
    expect("run", run, ParallelRun, cure="use ParallelRun.from_megatron(), or initialize_megatron(facts)")
    try:
        return _attach(chunks_of(model), plugin, read_hf_config(hf_config), lora, run)
    except Exception as error:
        plugin.on_error(error, "attach")
        raise


def _attach(
    chunks: tuple[nn.Module, ...],
    plugin: SelectedPlugin,
    hf_config: Mapping[str, object],
    lora: LoraConfig,
    run: ParallelRun,
) -> LoraAdapter:
    try:
        table, located = _prepare(chunks, plugin, hf_config, lora, run)
    except Exception as error:
        # The other ranks wait for this one's word; it raises its own error, they say which rank could not.
        with suppress(LoraError):
            agree(Claim(plugin=plugin.name, version=plugin.version, error=str(error) or repr(error)), run)
        raise
    stages = place_on_stages(table, agree(claim_of(plugin, table, list(located)), run))

    with ExitStack() as undo:
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        for hook in _recompute_hooks(chunks, plugin):
            undo.callback(hook.remove)
        handles = []
        for plan in table.plans:
            if plan.host_module in located:
                handle = plugin.attach_site(located[plan.host_module], plan, lora, run)
                undo.callback(handle.remove)
                handles.append(handle)
        restore = ExitStack()
        adapter = LoraAdapter(
            plugin=plugin,
            table=table,
            hf_config=hf_config,
            run=run,
            chunks=chunks,
            handles=tuple(handles),
            stages=stages,
            restore=restore,
        )
        undo.callback(mark, chunks, None)
        mark(chunks, adapter)
        plugin.after_attach(adapter)
        # Reached only when every site took its adapter; otherwise leaving the block puts everything back.
        restore.push(undo.pop_all())
    return adapter


def _prepare(
    chunks: tuple[nn.Module, ...],
    plugin: SelectedPlugin,
    hf_config: Mapping[str, object],
    lora: LoraConfig,
    run: ParallelRun,
) -> tuple[ParameterTable, dict[str, nn.Module]]:
    """The table, and this rank's host linears by model-wide path; changes nothing and talks to nobody."""
    table = derive_table(plugin, hf_config, lora, run.facts)
    _refuse_wrapped(chunks)
    _refuse_meta(chunks)
    refuse_sequential(chunks, table.plans)
    found = locate(chunks, (plan.site.path for plan in table.plans))
    _refuse_unknown_layers(found, plugin, hf_config)
    plans = {plan.host_module: plan for plan in table.plans}
    located = {path: module for path, (module, _) in found.items() if path in plans}
    for path, module in located.items():
        check_host(module, plans[path], run.facts)
    return table, located


def detach(model: Model) -> None:
    """Take the adapter off: the model is bit for bit what it was, `requires_grad` flags included.

    Raises:
        LoraError: no adapter is attached.
    """
    adapter_of(model).restore.close()


def _refuse_wrapped(chunks: tuple[nn.Module, ...]) -> None:
    if find_adapter(chunks) is not None:
        raise LoraError("this model", reason="carries an adapter already", cure="detach it before attaching another")
    for chunk in chunks:
        wrapped = isinstance(chunk, torch.nn.parallel.DistributedDataParallel)
        if wrapped or any(hasattr(parameter, "main_grad") for parameter in chunk.parameters()):
            raise LoraError(
                "this model",
                reason="is wrapped for data parallelism already, so gradients of new factors would not be reduced",
                cure="attach first, then wrap",
            )


def _refuse_meta(chunks: tuple[nn.Module, ...]) -> None:
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        if parameter.is_meta:
            raise LoraError(
                name,
                reason="is on the meta device, which holds no values, and its factors would be there too",
                cure="materialise the model (model.to_empty(device=...)) and load its weights first, then attach",
            )


def _refuse_unknown_layers(found: Iterable[str], plugin: SelectedPlugin, hf_config: Mapping[str, object]) -> None:
    known = {one.host for one in candidates(plugin.architecture, hf_config)}
    unknown = [path for path in found if path not in known]
    if unknown:
        raise LoraError(
            f"{unknown[0]} and {len(unknown) - 1} more" if len(unknown) > 1 else unknown[0],
            reason="lies beyond the layers that the HF config gives the model, and would stay without an adapter",
            cure="attach with the config.json that the model was built with",
        )


def _recompute_hooks(chunks: tuple[nn.Module, ...], plugin: SelectedPlugin) -> list[Any]:
    """Let the first recomputed block see an input that requires grad.

    With a frozen embedding it does not, and reentrant checkpointing then returns outputs without a gradient: the
    adapter would silently not train. Hooked where the stack of layers is called, whatever class it has.
    """
    sites = [site.path for site in plugin.architecture.sites if site.per_layer]
    stacks = {path.split(".{layer}")[0].rsplit(".", 1)[0] for path in sites}
    return [
        module.register_forward_pre_hook(_require_input_grad, with_kwargs=True)
        for chunk in chunks  # each virtual pipeline chunk has a stack of its own
        for module, _ in locate((chunk,), sorted(stacks)).values()
    ]


def _require_input_grad(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden_states = kwargs.get("hidden_states", args[0] if args else None)
    recompute = getattr(getattr(module, "config", None), "recompute_granularity", None)
    if (
        recompute is not None
        and torch.is_grad_enabled()
        and isinstance(hidden_states, torch.Tensor)
        and hidden_states.is_leaf
    ):
        hidden_states.requires_grad_(True)
