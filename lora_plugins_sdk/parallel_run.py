"""One rank's place in a parallel run: facts, ranks and live process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.run import RunFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRun:
    """Facts plus the groups that this rank communicates in.

    Process groups are handed in, never read from a global by the SDK's own code; a group may be None when its size is
    1.

    Args:
        facts: sizes of the parallel dimensions.
        tp_rank, pp_rank, dp_rank, ep_rank, etp_rank, expert_dp_rank: this rank's index in each dimension.
        tp_group, pp_group, dp_group: live groups (`dp_group` spans data and context parallel ranks).
        ep_group, etp_group, etp_ep_group: live groups of the routed experts; the last spans all ranks that tokens are
            dispatched over.
        expert_dp_group: ranks that hold the same part of the same experts.
    """

    facts: RunFacts
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    expert_dp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    etp_group: dist.ProcessGroup | None = None
    etp_ep_group: dist.ProcessGroup | None = None
    expert_dp_group: dist.ProcessGroup | None = None

    @classmethod
    def single(cls) -> ParallelRun:
        """The run of one process without any process group."""
        return cls(facts=RunFacts())

    @classmethod
    def from_megatron(cls, *, sequence_parallel: bool = False, make_vocab_size_divisible_by: int = 1) -> ParallelRun:
        """Read sizes, ranks and groups from megatron-core's initialised `parallel_state`.

        Args:
            sequence_parallel, make_vocab_size_divisible_by: as in :class:`RunFacts`; the groups do not tell them.

        Raises:
            LoraError: it is not initialised.
        """
        from megatron.core import parallel_state as ps

        if not ps.model_parallel_is_initialized():
            raise LoraError(
                "megatron-core's parallel state",
                reason="is not initialised, so there are no groups to read",
                cure="call lora_plugins_sdk.hosts.initialize.initialize_megatron(facts), or in your own trainer "
                "torch.distributed.init_process_group and parallel_state.initialize_model_parallel",
            )
        ep_group = _live(ps.get_expert_model_parallel_group())
        etp_group = _live(ps.get_expert_tensor_parallel_group())
        expert_dp_group = _live(ps.get_expert_data_parallel_group())
        return cls(
            facts=RunFacts(
                tp=ps.get_tensor_model_parallel_world_size(),
                pp=ps.get_pipeline_model_parallel_world_size(),
                dp=ps.get_data_parallel_world_size(),
                cp=ps.get_context_parallel_world_size(),
                ep=ep_group.size(),
                etp=etp_group.size(),
                sequence_parallel=sequence_parallel,
                make_vocab_size_divisible_by=make_vocab_size_divisible_by,
            ),
            tp_rank=ps.get_tensor_model_parallel_rank(),
            pp_rank=ps.get_pipeline_model_parallel_rank(),
            dp_rank=ps.get_data_parallel_rank(),
            ep_rank=ep_group.rank(),
            etp_rank=etp_group.rank(),
            expert_dp_rank=expert_dp_group.rank(),
            tp_group=_live(ps.get_tensor_model_parallel_group()),
            pp_group=_live(ps.get_pipeline_model_parallel_group()),
            dp_group=_live(ps.get_data_parallel_group(with_context_parallel=True)),
            ep_group=ep_group,
            etp_group=etp_group,
            etp_ep_group=_live(ps.get_expert_tensor_and_model_parallel_group()),
            expert_dp_group=expert_dp_group,
        )


def _live(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to one group of every kind"
    return group
