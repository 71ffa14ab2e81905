"""This process's place in the run: alone, or one of the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lora_harness.engines.sglang.engine import MOST_RESTARTS
from lora_plugins_sdk import LoraError, ParallelRun, RunFacts
from lora_plugins_sdk.hosts.initialize import initialize_megatron

if TYPE_CHECKING:
    from lora_harness.config import ParallelSection, RolloutSection, TrainConfig

# Ranks wait while rank 0 makes a base, or others draw in their own process and score; NCCL's ten minutes would end the
# run without words.
_PATIENCE = timedelta(hours=4)
# Torch counts nanoseconds in 64 bits, which hold 292 years.
_MOST_SECONDS = timedelta(days=3650).total_seconds()

START = "torchrun --nproc-per-node {ranks} -m lora_harness ..."


@contextmanager
def started(config: TrainConfig) -> Iterator[ParallelRun]:
    """Join torchrun's world (or make one of this process alone), split as the config says; left when the context ends.

    Args:
        config: the run's; its seed is that of megatron-core's CUDA generators.

    Raises:
        LoraError: as `run_facts`, or experts cannot be laid out over the ranks.
    """
    run = initialize_megatron(run_facts(config.parallel), seed=config.seed, timeout=patience(config.rollout))
    from megatron.core import parallel_state

    try:
        yield run
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_facts(parallel: ParallelSection) -> RunFacts:
    """The parallel sizes of the started processes. The data parallel size is what is left: world size / (tp * pp).

    Args:
        parallel: the config's sizes.

    Raises:
        LoraError: the number of started processes is no multiple of tp * pp.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = parallel.tp * parallel.pp
    if world % model:
        raise LoraError(
            f"parallel.tp * parallel.pp = {model}",
            reason=f"cannot share out {world} started process{'es' if world > 1 else ''}",
            cure=f"start a multiple of {model} processes, e.g. `{START.format(ranks=model)}`",
        )
    return RunFacts(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=world // model,
        ep=parallel.ep,
        etp=parallel.tp if parallel.etp is None else parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
    )


def patience(rollout: RolloutSection) -> timedelta:
    """How long ranks wait for each other: longer than engines may take, whose own limits end a run with words.

    Args:
        rollout: names the engines and their limits.
    """
    section, seconds = rollout.sglang, 0.0
    if section is not None:
        # Every engine may be started anew so often in one call, each time when another was asked again already.
        restarts = 0 if section.urls else MOST_RESTARTS * section.engines
        seconds = (restarts + 1) * section.timeout + restarts * section.start_timeout
    return _PATIENCE + timedelta(seconds=min(seconds, _MOST_SECONDS))


def run_device() -> torch.device:
    """Where this rank's models live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
