"""megatron-core's own distributed checkpoints: each factor under its true sharding.

A host linear's `sharded_state_dict` knows its own weight alone: it would store the factors as replicas over TP, of
which a checkpoint keeps the first rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.pack import pads
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.table import ParamRow

Sharded = Callable[..., dict[str, Any]]


def patched_sharded_state_dict(module: nn.Module, factors: LoraFactors, run: ParallelRun, name: str) -> Sharded:
    """A host linear's `sharded_state_dict(prefix, sharded_offsets, metadata)`, with the factors as they are sharded.

    Args:
        module: the host linear.
        factors: its factors, registered as its submodule `name`.
        run: this rank's place.
        name: see `factors`.
    """
    own: Sharded = getattr(module, "sharded_state_dict", None) or partial(_replicated, module)

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # The host's own method takes every tensor that it does not know for a replica.
        module._modules.pop(name)
        try:
            state = own(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)
        finally:
            module._modules[name] = factors
        return state | _sharded_factors(factors, run, f"{prefix}{name}.")

    return sharded_state_dict


def _replicated(module: nn.Module, *, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
    """What megatron-core makes of a module without a method of its own."""
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

    return make_sharded_tensors_for_checkpoint(
        module.state_dict(keep_vars=True),
        prefix,
        {},
        sharded_offsets,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )


def _sharded_factors(factors: LoraFactors, run: ParallelRun, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}{name}": _sharded(factors, name, rows[0], run, prefix) for name, rows in factors.stored_rows().items()
    }


def _sharded(factors: LoraFactors, name: str, row: ParamRow, run: ParallelRun, prefix: str) -> Any:
    """One stored tensor: a sharded tensor, or several where TP splits its sections each on its own."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    stored = factors.stored(name)
    # megatron-core takes a layer's number out of the key and makes it a dimension over all layers; targets may be some.
    key = f"{prefix}{name}" if row.layer is None else f"{prefix}{name}.{row.layer}"
    pack, padded = factors.plan.site.pack, "A" if row.embedding else "B"
    make = partial(
        ShardedTensor.from_rank_offsets,
        replica_id=_replica(row, run),
        # Ranks of another number pad a vocabulary otherwise.
        allow_shape_mismatch=row.factor == padded and pads(pack),
    )
    offsets = list(_offsets(row, run))
    if len(row.sections) == 1:
        return make(key, stored, *offsets)
    sizes = [section.local for section in row.sections]

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        parts = tensor.split(sizes, dim=-2)
        return [make(f"{key}.{number}", part, *offsets, replica_id=replica_id) for number, part in enumerate(parts)]

    def merge(parts: Any) -> torch.Tensor:
        return torch.cat(list(parts), dim=-2)

    return ShardedTensorFactory(key, stored, build, merge, _replica(row, run))


def _offsets(row: ParamRow, run: ParallelRun) -> Iterable[tuple[int, int, int]]:
    """(dimension, this rank's part of it, number of parts) for each dimension that is split."""
    if row.expert_dim >= 0:
        yield row.expert_dim, run.ep_rank, run.facts.ep
    if row.partition_dim >= 0:
        yield (row.partition_dim, *_tensor_parallel(row, run))


def _replica(row: ParamRow, run: ParallelRun) -> tuple[int, int, int]:
    """All zero on the one rank whose copy is stored."""
    over_experts = run.ep_rank if row.expert and row.expert_dim < 0 else 0
    over_tensor_parallel = _tensor_parallel(row, run)[0] if row.partition_dim < 0 else 0
    return over_experts, over_tensor_parallel, run.expert_dp_rank if row.expert else run.dp_rank


def _tensor_parallel(row: ParamRow, run: ParallelRun) -> tuple[int, int]:
    return (run.etp_rank, run.facts.etp) if row.expert else (run.tp_rank, run.facts.tp)
