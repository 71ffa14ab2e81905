"""How long ranks of a run wait for each other."""

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from lora_harness.config import RolloutSection, SglangSection
from lora_harness.engines.sglang.engine import MOST_RESTARTS
from lora_harness.launch import patience

ENGINES, TIMEOUT, START_TIMEOUT = 4, 5400.0, 900.0
SCRIPT = f"""
import torch
import torch.distributed as dist
from lora_harness.config import parse_config
from lora_harness.launch import started
sglang = {{"engines": {ENGINES}, "timeout": {TIMEOUT}, "start_timeout": {START_TIMEOUT}}}
raw = {{"model": {{"path": "base"}}, "steps": 1, "task": {{"kind": "reasoning_gym", "dataset": "chain_sum"}}}}
with started(parse_config(raw | {{"rollout": {{"engine": "sglang", "sglang": sglang}}}})):
    print(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""


def longest(engines: int, timeout: float, start_timeout: float) -> float:
    """Every engine dies as often as it may, each in a round of its own that takes all its time; the last one ends."""
    deaths = engines * MOST_RESTARTS
    return (deaths + 1) * timeout + deaths * start_timeout


def rollout(**sglang: Any) -> RolloutSection:
    return RolloutSection(engine="sglang", mode="merge", sglang=SglangSection(**sglang))


@pytest.mark.world
def test_ranks_wait_longer_than_the_engines_may_take_for_their_completions() -> None:
    """Each time until it is aborted, with the restarts between: torch's own limit would end a run of several ranks."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True, env=os.environ | world)
    assert float(done.stdout) > longest(ENGINES, TIMEOUT, START_TIMEOUT)


@pytest.mark.parametrize("engines", [1, 2, 8])
@pytest.mark.parametrize("timeout", [1800.0, 5400.0, 86400.0])
def test_patience_follows_the_engines_limits(engines: int, timeout: float) -> None:
    assert patience(rollout(engines=engines, timeout=timeout)).total_seconds() > longest(engines, timeout, 600.0)


def test_patience_without_engines_to_restart() -> None:
    """In this process there are none; those of somebody else are asked once."""
    assert patience(RolloutSection()) == timedelta(hours=4)
    theirs = rollout(urls=["http://127.0.0.1:30000"] * 3, timeout=7200.0)
    assert patience(theirs) == timedelta(hours=4 + 2)


def test_patience_that_torch_cannot_count_is_cut() -> None:
    """A timeout that means never; 292 years of nanoseconds would be negative."""
    assert timedelta(days=3650) < patience(rollout(engines=8, timeout=1e300)) < timedelta(days=4000)
