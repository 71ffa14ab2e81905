"""Whether a checkpoint belongs to a run: everything that differs is listed, each with the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_harness.checkpoint.state import RunIdentity, RunState
from lora_harness.config import TrainConfig
from lora_plugins_sdk import RunFacts, base_fingerprint, derive_table, load_plugin, read_hf_config
from lora_plugins_sdk.adapter_files import adapter_digest
from lora_plugins_sdk.errors import Diagnostic

# Keys and tables that decide where and how fast a run goes, not what it computes; paths are compared by content.
FREE = (
    "checkpoint",
    "eval.every",
    "model.path",
    "model.plugin",
    "output",
    "parallel",
    "rollout.delta_skip",
    "rollout.engine",
    "rollout.max_batch_size",
    "rollout.max_logprob_gap",
    "rollout.mode",
    "rollout.sglang",
    "rollout.sync_buffer_mib",
    "steps",
    "warm_start.adapter",
)
_START_ANEW = "or start a new run from the weights alone: --resume PATH --load-weights-only with a new output"
_ABSENT = "not set"


def identify(config: TrainConfig, facts: RunFacts) -> RunIdentity:
    """The identity of the run that `config` describes. Builds no model.

    Raises:
        LoraError: the model directory, the plugin or the warm-start adapter cannot be used.
    """
    hf_config = read_hf_config(config.model.path)
    plugin = load_plugin(str(hf_config.get("model_type")), plugin=config.model.plugin)
    table = derive_table(plugin, hf_config, config.lora.to_sdk(seed=config.seed), facts)
    warm = config.warm_start.adapter
    return RunIdentity(
        base=base_fingerprint(config.model.path),
        plugin=plugin.name,
        plugin_version=plugin.version,
        table=table.logical_digest(),
        warm_start=None if warm is None else adapter_digest(warm),
        config=config.model_dump(mode="json", exclude_none=True),
    )


def differences(state: RunState, run: RunIdentity) -> Iterator[Diagnostic]:
    """Why a run cannot continue from a checkpoint; nothing when it can."""
    yield from weights_differences(state, run)
    saved = state.identity
    if saved.warm_start != run.warm_start:
        yield Diagnostic(
            subject="warm_start.adapter",
            reason="is not the adapter that the checkpoint's run started from",
            cure=f"give that adapter, {_START_ANEW}",
        )
    before, now = dict(_flat(saved.config)), dict(_flat(run.config))
    for key in sorted(before.keys() | now.keys()):
        there, here = (repr(one[key]) if key in one else _ABSENT for one in (before, now))
        if there != here and not _is_free(key):
            yield Diagnostic(
                subject=key,
                reason=f"is {here}, in the checkpoint's run it was {there}",
                cure=f"set it back, {_START_ANEW}",
            )
    yield from _length(state, run)


def weights_differences(state: RunState, run: RunIdentity) -> Iterator[Diagnostic]:
    """Why a checkpoint's adapter does not fit a run's model."""
    saved = state.identity
    if saved.base != run.base:
        yield Diagnostic(
            subject=f"model.path = {run.config['model']['path']!r}",
            reason="holds another base model (config.json or weights) than the checkpoint was trained on",
            cure=f"give that model; it was in {saved.config.get('model', {}).get('path')!r}",
        )
    if saved.plugin != run.plugin:
        yield Diagnostic(
            subject=f"plugin {run.plugin!r}",
            reason=f"the checkpoint was made with plugin {saved.plugin!r}",
            cure="set model.plugin to that one",
        )
    if saved.table != run.table:
        yield Diagnostic(
            subject="lora",
            reason="gives an adapter of other factors (targets, rank, alpha or rsLoRA) than the checkpoint's"
            + (f"; plugin version {run.plugin_version} against {saved.plugin_version}" * _updated(saved, run)),
            cure="use the checkpoint's lora table" + (" and plugin version" * _updated(saved, run)),
        )


def _updated(saved: RunIdentity, run: RunIdentity) -> bool:
    return saved.plugin == run.plugin and saved.plugin_version != run.plugin_version


def _length(state: RunState, run: RunIdentity) -> Iterator[Diagnostic]:
    before, now = state.identity.config.get("steps"), run.config["steps"]
    if now < state.step:
        yield Diagnostic(subject=f"steps = {now}", reason=f"step {state.step} is finished", cure="set it higher")
    elif now != before and run.config["optimizer"]["schedule"] != "constant":
        yield Diagnostic(
            subject=f"steps = {now}",
            reason=f"the learning rates of the steps already done were those of a run of {before} steps",
            cure=f"set it back, {_START_ANEW}",
        )


def _is_free(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in FREE)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
