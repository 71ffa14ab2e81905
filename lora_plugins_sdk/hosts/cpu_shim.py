"""What in megatron-core assumes CUDA and stands in the way of a model on a CPU, lifted in one place.

For megatron-core 0.16 and 0.19: training with TP, SP, PP, DP, CP, EP, expert TP and activation recompute, through
megatron-core's own schedules and DistributedDataParallel. Not lifted: megatron-core's optimizers, the flex dispatcher.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lora_plugins_sdk.hosts.context_parallel import zigzag_positions
from lora_plugins_sdk.hosts.eager_functions import run_eagerly
from lora_plugins_sdk.hosts.uneven import gather_uneven

_installed = False


def install_cpu_shim() -> bool:
    """Make megatron-core usable without CUDA. Idempotent; does nothing where CUDA is available.

    Returns:
        Whether the shim is in force.
    """
    global _installed
    if torch.cuda.is_available() or _installed:
        return _installed
    _lift_torch_cuda()
    _lift_rng()
    _lift_fp8()
    _lift_schedules()
    _lift_tied_embedding()
    _lift_rope()
    _lift_experts()
    _lift_uneven_parts()
    # Obstacle: compiling needs a C++ compiler, which many a CPU machine lacks, and takes seconds in each process.
    run_eagerly()
    _installed = True
    return True


class _NoStream:
    """A CPU runs in program order, so there is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _NoStream:
        return self

    def synchronize(self) -> None: ...


def _lift_torch_cuda() -> None:
    cpu, stream = torch.device("cpu"), _NoStream()
    # Obstacle: `device=torch.cuda.current_device()` for parameters, rope, collectives, p2p and gradient buffers.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment]
    # Obstacle: p2p_communication synchronizes after each batch_isend_irecv.
    torch.cuda.synchronize = lambda device=None: None
    # Obstacle: 0.19's param_and_grad_buffer asks for the current stream before it reduces a bucket, and the alltoall
    # dispatcher before it reads the split sizes, for which it makes a stream of its own.
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment]
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]


def _lift_rng() -> None:
    from megatron.core.tensor_parallel import random

    # Obstacle: the tracker saves and restores CUDA generator states when it forks (under SP, in weight init).
    # Its inference variant forks nothing; the base has no dropout that would need distinct states.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Obstacle: activation recompute saves the CUDA generator's state. The CPU's, saved next to it, is enough.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    # Obstacle: restoring it queues a callback for CUDA's start, which never comes: the queue grows with every layer.
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _lift_fp8() -> None:
    from megatron.core.tensor_parallel import random

    initialise = random.CheckpointWithoutOutput.__init__

    # Obstacle: recompute of single outputs ("layernorm", "moe_act") takes its default, fp8=False, for fp8 set, and
    # asks Transformer Engine for it.
    @functools.wraps(initialise)
    def without_fp8(self: random.CheckpointWithoutOutput, fp8: Any = None) -> None:
        initialise(self, fp8 or None)  # type: ignore[arg-type]

    random.CheckpointWithoutOutput.__init__ = without_fp8


class _TorchWithoutCuda(ModuleType):
    """`torch` as one megatron-core module sees it: `device="cuda"` in `torch.zeros` means the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **kwargs)


def _lift_schedules() -> None:
    from megatron.core.pipeline_parallel import schedules

    # Obstacle: `total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")` in all three schedules.
    schedules.torch = _TorchWithoutCuda("torch")


def _lift_tied_embedding() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    set_up = LanguageModule.setup_embeddings_and_output_layer

    # Obstacle: `weight.data.cuda()` on the copies of a tied embedding under PP.
    @functools.wraps(set_up)
    def without_cuda(self: LanguageModule) -> None:
        original = torch.Tensor.cuda
        torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
        try:
            set_up(self)
        finally:
            torch.Tensor.cuda = original

    LanguageModule.setup_embeddings_and_output_layer = without_cuda


def _lift_rope() -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    # Obstacle: under CP the index of a rank's positions is pinned and moved with `.cuda()`.
    def on_this_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: dist.ProcessGroup) -> torch.Tensor:
        positions = zigzag_positions(pos_emb.shape[seq_dim], cp_group.rank(), cp_group.size())
        return pos_emb.index_select(seq_dim, positions)

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = on_this_rank


def _lift_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Obstacle: 0.16's router asks for this name of Transformer Engine, and defines it only where that is installed.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

    # Obstacle: the split sizes of the all-to-all become arrays only when they come from a GPU.
    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu


def _lift_uneven_parts() -> None:
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim

    # Obstacle: under expert TP the alltoall dispatcher gathers unequal numbers of tokens, which gloo cannot do.
    @functools.wraps(gather)
    def gather_any(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        return gather_uneven(input_, output_split_sizes, group)

    mappings._gather_along_first_dim = gather_any
