"""What each engine and mode can serve, and whether a run asks for more. Known before any model is loaded. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_harness.engines.base import EngineCapabilities
from lora_harness.engines.sglang.base_fit import refuse_other_layouts, refuse_unfit_base
from lora_plugins_sdk import derive_table, load_plugin, read_hf_config
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.serving.sglang_places import HELD_AT_ZERO, OUTSIDE, family_of, served_leaves

if TYPE_CHECKING:
    from lora_harness.config import RolloutSection, TrainConfig
    from lora_plugins_sdk import LoraConfig, ParameterTable, RunFacts, SelectedPlugin

_IN_LAYER = re.compile(r".*\blayers\.\d+\.(?:(?P<experts>.*\bexperts)\.(?:\d+|\{expert\})\.)?(?P<path>.+)")
_ROUTER = re.compile(r"(?:^|\.)(?:router|mlp\.gate|mlp\.shared_expert_gate)$")


def engine_capabilities(rollout: RolloutSection, hf_config: Mapping[str, Any], *, max_rank: int) -> EngineCapabilities:
    """What the engine of a run can serve.

    Args:
        rollout: names engine and mode.
        hf_config: the base's `config.json`.
        max_rank: the rank that SGLang is started for in adapter mode.
    """
    if rollout.engine == "sglang" and rollout.sync_mode == "adapter":
        served = frozenset({*served_leaves(family_of(hf_config)), *OUTSIDE})
        return EngineCapabilities(
            name="sglang",
            mode="adapter",
            servable_projections=served,
            pinned_projections=frozenset(HELD_AT_ZERO),
            max_rank=max_rank,
        )
    return EngineCapabilities(name=rollout.engine, mode=rollout.sync_mode)


def refuse_unservable(config: TrainConfig, facts: RunFacts) -> None:
    """Refuse to train what the engine cannot serve. Builds no model.

    Args:
        config: the training config.
        facts: the run's parallel sizes.

    Raises:
        LoraError: a base that SGLang cannot serve, no plugin for the model, a target that it does not have, or factors
            that the engine and its mode cannot serve; each projection is listed once.
    """
    hf_config = read_hf_config(config.model.path)
    if config.rollout.sglang is not None:
        refuse_unfit_base(config.rollout.sglang, hf_config)
        if not (config.rollout.sglang.urls and config.rollout.train_only):  # the base meets no engine then
            refuse_other_layouts(config.model.path, hf_config)
    if config.rollout.train_only:
        return
    plugin = load_plugin(str(hf_config.get("model_type")), plugin=config.model.plugin)
    refuse_unfit_targets(config, plugin, hf_config, facts)


def refuse_unfit_targets(
    config: TrainConfig, plugin: SelectedPlugin, hf_config: Mapping[str, Any], facts: RunFacts
) -> None:
    """Refuse an adapter that the model cannot have or the engine cannot serve. Needs no files.

    Args:
        config: the training config.
        plugin: the model's.
        hf_config: the base's `config.json`.
        facts: the run's parallel sizes.

    Raises:
        LoraError: what the model does not have, or factors that the engine and its mode cannot serve; each projection
            is listed once.
    """
    table = derive_table(plugin, hf_config, lora_of_run(config, plugin, hf_config, facts), facts)
    if config.rollout.train_only:
        return
    able = engine_capabilities(config.rollout, hf_config, max_rank=config.lora.rank)
    raise_if_any("the rollout engine cannot serve what is to be trained:", unservable(table, able))


def lora_of_run(
    config: TrainConfig, plugin: SelectedPlugin, hf_config: Mapping[str, Any], facts: RunFacts
) -> LoraConfig:
    """The adapter's options, with pins for what the engine leaves out of a linear that it serves otherwise.

    Args:
        config: the training config.
        plugin: the model's.
        hf_config: the base's `config.json`.
        facts: the run's parallel sizes.
    """
    lora = config.lora.to_sdk(seed=config.seed)
    able = engine_capabilities(config.rollout, hf_config, max_rank=lora.rank)
    if config.rollout.train_only or not able.pinned_projections:
        return lora
    adapted = {projection(row.hf_module) for row in derive_table(plugin, hf_config, lora, facts).rows}
    return replace(lora, pinned_modules=tuple(sorted(adapted & able.pinned_projections)))


def unservable(table: ParameterTable, able: EngineCapabilities) -> Iterator[Diagnostic]:
    """Every projection of a table that an engine cannot serve and that is not held at zero."""
    seen: set[str] = set()
    for plan in table.plans:
        for row in plan.rows:
            leaf = projection(row.hf_module)
            if leaf not in seen and not row.pinned:
                seen.add(leaf)
                yield from _problems(leaf, plan.site.region, able)


def projection(module: str) -> str:
    """A module's path within its layer, the number of an expert left out; its last name outside the layers."""
    found = _IN_LAYER.fullmatch(module)
    if found is None:
        return module.rsplit(".", 1)[-1]
    return f"{found['experts']}.{found['path']}" if found["experts"] else found["path"]


def _problems(leaf: str, region: str, able: EngineCapabilities) -> Iterator[Diagnostic]:
    mode = f"the engine {able.name!r} in {able.mode} mode"
    if region != "language" and able.mode == "adapter":
        yield Diagnostic(
            subject=leaf,
            reason=f"belongs to the {region} part, and {mode} serves adapters of the language model only",
            cure="set lora.scope = 'language', or use engine 'sglang' with rollout.mode = 'merge'",
        )
    elif _ROUTER.search(leaf) and able.mode == "merge":
        yield Diagnostic(
            subject=leaf,
            reason="routes tokens to experts, and routers are trained in adapter mode only",
            cure="add it to lora.exclude_modules, or use an engine that serves it as an adapter",
        )
    elif able.servable_projections is not None and leaf not in able.servable_projections:
        yield Diagnostic(
            subject=leaf,
            reason=f"{mode} serves no LoRA there",
            cure="add it to lora.exclude_modules, or set rollout.mode = 'merge'",
        )
