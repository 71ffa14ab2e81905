"""One engine inside a process. Run these in a process of its own (`OwnProcess`): they import SGLang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
from rollout_runs import opened, policy, requests, run_config

from lora_harness.engines import Completion
from lora_harness.engines.sglang.engine import SglangEngine
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.weight_files import read_weight_files

_engine: SglangEngine | None = None


def engine() -> SglangEngine:
    """This process's engine."""
    assert _engine is not None
    return _engine


def start(model: str, output: str) -> list[str]:
    """Open it in adapter mode and publish version 1; returns what it said."""
    global _engine
    said: list[str] = []
    _engine = opened(run_config(Path(model), Path(output), mode="adapter", sglang={"in_process": True}), said)
    first = policy(Path(model), 1)
    _engine.publish(1, first.tensors, first.config)
    return said


def draw(**options: Any) -> list[Completion]:
    """Completions of `requests(**options)`."""
    return engine().generate(requests(**options))


def replace_weights(model: str) -> tuple[str | None, int, int]:
    """Push one weight through a full-weight update, then the base's own value again.

    Returns:
        The stamp of the weights afterwards, and how many checksums changed on the way and stayed changed.
    """
    import torch

    client = engine()._group.clients[0]
    name = "model.layers.1.self_attn.o_proj.weight"
    base = read_weight_files(Path(model))
    assert name in base.where
    before = client.weight_checksums()
    original = _tensor(model, name)
    changed = 0
    for value, version in ((torch.zeros_like(original), "a"), (original, "b")):
        client.begin_weight_update()
        client.update_weights({name: value})
        client.end_weight_update(version)
        now = client.weight_checksums()
        changed = max(changed, sum(now[one] != before[one] for one in before))
    from lora_harness.engines.base import SamplingParams
    from lora_harness.engines.sglang.client import SglangRequest

    request = SglangRequest(rid="w", prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=1), seed=0)
    return client.generate([request])[0].weight_version, changed, sum(now[one] != before[one] for one in before)


def _tensor(model: str, name: str) -> Any:
    from safetensors import safe_open

    base = read_weight_files(Path(model))
    with safe_open(base.headers[base.where[name]].path, framework="pt") as file:
        return file.get_tensor(name)


def kill_and_draw() -> str:
    """SIGKILL the process that holds the model, then draw; returns the error. This process must live on."""
    group = engine()._group
    group._restart = None
    for child in psutil.Process().children(recursive=True):
        if "scheduler" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    try:
        draw(samples=1)
    except LoraError as error:
        return str(error)
    return ""


def stop() -> int:
    """Close it; returns how many children are left."""
    engine().close()
    return len(psutil.Process().children(recursive=True))
