"""From a training config to a `SglangEngine`: arguments, engines, and the way in which the policy reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_harness.config import TrainConfig
from lora_harness.config.rollout import SglangSection
from lora_harness.engines.capabilities import engine_capabilities
from lora_harness.engines.model_files import context_length
from lora_harness.engines.sglang.arguments import engine_arguments
from lora_harness.engines.sglang.attached import refuse_unfit
from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.engine import SglangEngine
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.launching import LOG_DIRECTORY, connect, start_servers
from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.package import LoraSettings, Packer
from lora_harness.engines.sglang.sync.serving import PolicySync
from lora_harness.engines.sglang.sync.transport import DirectoryTransport, MemoryTransport
from lora_harness.ranks import is_alone, on_first_rank
from lora_plugins_sdk import LoraError, read_hf_config
from lora_plugins_sdk.serving.sglang import for_sglang
from lora_plugins_sdk.serving.sglang_config import has_delta_nets, missing_keys
from lora_plugins_sdk.serving.sglang_places import family_of, text_config

if TYPE_CHECKING:
    from lora_plugins_sdk import PeftAdapter

Say = Callable[[str], None]


def open_sglang(config: TrainConfig, policy: PeftAdapter, *, say: Say = print) -> SglangEngine:
    """Start or find the engines of a run. Collective over all ranks.

    Args:
        config: the training config.
        policy: the adapter before training; engines are started for its targets, rank and experts' layout.
        say: told about the progress, on rank 0.

    Raises:
        LoraError: on every rank: the adapter cannot be served, or an engine cannot be started, reached or used.
    """
    hf_config = read_hf_config(config.model.path)
    # What may be refused comes first: an error later on would leave the engines running.
    capabilities = engine_capabilities(config.rollout, hf_config, max_rank=config.lora.rank)
    vocab_size, context = int(text_config(hf_config)["vocab_size"]), context_length(config.model.path)
    opened: list[tuple[EngineGroup, PolicySync | None]] = []

    def open_on_first() -> list[str]:
        group, sync = _open(config, policy, hf_config, say)
        opened.append((group, sync))
        return [client.name for client in group.clients]

    urls = on_first_rank(open_on_first)
    section = _section(config)
    group, sync = (
        opened[0] if opened else (EngineGroup([HttpClient(url, timeout=section.timeout) for url in urls]), None)
    )
    return SglangEngine(group, sync, capabilities=capabilities, vocab_size=vocab_size, context=context)


def _open(
    config: TrainConfig, policy: PeftAdapter, hf_config: Mapping[str, Any], say: Say
) -> tuple[EngineGroup, PolicySync | None]:
    rollout, section = config.rollout, _section(config)
    if rollout.mode is None and not rollout.train_only:
        say(
            "warning: rollout.mode is not set: the policy reaches SGLang as full merged weights; "
            "rollout.mode = 'adapter' sends the adapter alone"
        )
    lora = lora_settings(policy, hf_config, section) if _sends_adapters(config) else None
    group = _engines(config, hf_config, lora, say)
    try:
        return group, _sync(config, group, lora)
    except BaseException:
        for client in group.clients:
            client.close()
        raise


def lora_settings(policy: PeftAdapter, hf_config: Mapping[str, Any], section: SglangSection) -> LoraSettings:
    """What engines must be started with to serve an adapter.

    Raises:
        LoraError: SGLang cannot serve it; every such module is listed.
    """
    served = for_sglang(policy.tensors, policy.config, hf_config)
    assert section.keep is not None, "adapter mode fills it in"
    return LoraSettings(
        targets=frozenset(served.config["target_modules"]),
        max_rank=int(served.config["r"]),
        slots=section.keep + 1,
        shared_outer_experts=bool(served.shared_outer_experts),
    )


def _engines(config: TrainConfig, hf_config: Mapping[str, Any], lora: LoraSettings | None, say: Say) -> EngineGroup:
    section = _section(config)
    if section.urls:
        group = connect(section.urls, timeout=section.timeout, say=say)
        if not config.rollout.train_only:
            refuse_unfit(group, lora, hf_config)
        return group
    arguments = engine_arguments(
        model_path=str(config.model.path.absolute()),
        dtype=config.model.dtype,
        seed=config.seed,
        max_running_requests=config.rollout.max_batch_size,
        context=context_length(config.model.path),
        recurrent=has_delta_nets(hf_config),
        config_keys=missing_keys(hf_config),
        snapshots=family_of(hf_config) == "inkling",
        lora=lora,
        cpu=not torch.cuda.is_available(),
        given=section.arguments,
    )
    if section.in_process:
        log = config.output / LOG_DIRECTORY / "engine-0.log"
        return _in_process(arguments, log=log, timeout=section.timeout, say=say)
    return start_servers(arguments, section, output=config.output, say=say)


def _in_process(arguments: dict[str, Any], *, log: Path, timeout: float, say: Say) -> EngineGroup:
    if not is_alone():
        raise LoraError(
            "rollout.sglang.in_process",
            reason="serves one rank, and several were started",
            cure="remove it: a server serves all ranks",
        )
    from lora_harness.engines.sglang.in_process import start_in_process

    def start(_: int = 0) -> SglangClient:
        return start_in_process(arguments, log=log, timeout=timeout, say=say)

    return EngineGroup([start()], restart=start, say=say)


def _sync(config: TrainConfig, group: EngineGroup, lora: LoraSettings | None) -> PolicySync | None:
    rollout, section = config.rollout, _section(config)
    if rollout.train_only:
        return None
    assert rollout.sync_buffer_mib is not None, "the config fills it in"
    if lora is None:
        folder = Folder(config.model.path, rollout.sync_buffer_mib)
        return MergeSync(group, folder, dtype=getattr(torch, config.model.dtype), buffer_mib=rollout.sync_buffer_mib)
    directory = section.adapter_directory
    transport = MemoryTransport(rollout.sync_buffer_mib) if directory is None else DirectoryTransport(Path(directory))
    assert section.keep is not None, "adapter mode fills it in"
    return AdapterSync(group, Packer(config.model.path, lora), lora, transport, keep=section.keep)


def _sends_adapters(config: TrainConfig) -> bool:
    return config.rollout.sync_mode == "adapter" and not config.rollout.train_only


def _section(config: TrainConfig) -> SglangSection:
    assert config.rollout.sglang is not None, "engine = 'sglang' fills it in"
    return config.rollout.sglang
