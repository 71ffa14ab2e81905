"""This process's place in the run: alone, or one of the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lora_plugins_sdk import LoraError, ParallelRun, RunFacts
from lora_plugins_sdk.hosts.initialize import initialize_megatron

if TYPE_CHECKING:
    from lora_harness.config import ParallelSection

START = "torchrun --nproc-per-node {ranks} -m lora_harness ..."


@contextmanager
def started(parallel: ParallelSection, *, seed: int) -> Iterator[ParallelRun]:
    """Join torchrun's world (or make one of this process alone), split as the config says; left when the context ends.

    The data parallel size is what is left: world size / (tp * pp).

    Args:
        parallel: the parallel sizes.
        seed: seed of megatron-core's CUDA generators.

    Raises:
        LoraError: the number of started processes is no multiple of tp * pp, or experts cannot be laid out over them.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = parallel.tp * parallel.pp
    if world % model:
        raise LoraError(
            f"parallel.tp * parallel.pp = {model}",
            reason=f"cannot share out {world} started process{'es' if world > 1 else ''}",
            cure=f"start a multiple of {model} processes, e.g. `{START.format(ranks=model)}`",
        )
    facts = RunFacts(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=world // model,
        ep=parallel.ep,
        etp=parallel.tp if parallel.etp is None else parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
    )
    run = initialize_megatron(facts, seed=seed)
    from megatron.core import parallel_state

    try:
        yield run
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_device() -> torch.device:
    """Where this rank's models live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
