"""Start megatron-core's parallel groups on whatever machine this is."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.cpu_shim import install_cpu_shim
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.run import RunFacts


def initialize_megatron(facts: RunFacts, *, seed: int = 0, timeout: timedelta | None = None) -> ParallelRun:
    """Install the CPU shim if needed, create megatron-core's groups and describe this rank's place in them.

    Joins torchrun's world when started by it and no process group exists yet; otherwise makes a world of one process.

    Args:
        facts: sizes of the run; their product must be the world size.
        seed: seed of megatron-core's CUDA generators (dropout only; unused on a CPU).
        timeout: how long a rank of a world that is made here waits for the others; torch's own limit when None.

    Raises:
        LoraError: the world size is not tp * pp * cp * dp, or megatron-core is initialised already.
    """
    from megatron.core import parallel_state, tensor_parallel

    install_cpu_shim()
    if parallel_state.model_parallel_is_initialized():
        raise LoraError(
            "megatron-core's parallel state",
            reason="is initialised already",
            cure="describe it with ParallelRun.from_megatron(), or destroy it first",
        )
    if not dist.is_initialized():
        _start_world(timeout)
    ranks = facts.world_size
    if ranks != dist.get_world_size():
        raise LoraError(
            f"world size {dist.get_world_size()}",
            reason=f"tp {facts.tp} x pp {facts.pp} x cp {facts.cp} x dp {facts.dp} makes {ranks} ranks",
            cure=f"start {ranks} processes or change the parallel sizes",
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=facts.tp,
        pipeline_model_parallel_size=facts.pp,
        context_parallel_size=facts.cp,
        expert_model_parallel_size=facts.ep,
        expert_tensor_parallel_size=facts.etp,
        create_gloo_process_groups=False,  # on a CPU all groups are gloo; elsewhere nothing needs them
    )
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelRun.from_megatron(
        sequence_parallel=facts.sequence_parallel, make_vocab_size_divisible_by=facts.make_vocab_size_divisible_by
    )


def _start_world(timeout: timedelta | None) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
