"""Full factors from their shards: one gather over TP, ETP and EP each, one broadcast per pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.factors import TensorOf
from lora_plugins_sdk.shards import unshard
from lora_plugins_sdk.table import ParamRow


def gather_factors(adapter: LoraAdapter, of: TensorOf = torch.Tensor.detach) -> dict[ParamRow, torch.Tensor]:
    """Every factor of the model in HF order, `row.full_shape`, on every rank. Collective over the TP, ETP, EP
    and PP groups.

    Args:
        adapter: the attached adapter.
        of: what to gather in place of the factors themselves: a tensor of a parameter's shape and dtype. What an
            optimizer keeps for a factor travels by the factor's own pack.

    Returns:
        Row -> tensor on this rank's device, in table order; no tensor shares memory with the adapter's parameters.
    """
    full = _over_pipeline_parallel(adapter, _of_stage(adapter, of))
    return {row: full[row.init_key] for row in adapter.table.rows}


def _of_stage(adapter: LoraAdapter, of: TensorOf) -> dict[str, torch.Tensor]:
    """Full factors of this stage, by init key."""
    run = adapter.run
    tensors = {row: factors.local(row, of) for factors in adapter.factors() for row in factors.plan.rows}
    parts = {row: [tensor] for row, tensor in tensors.items()}
    parts |= _parts_of(
        {row: one for row, one in tensors.items() if row.partition_dim >= 0 and not row.expert}, run.tp_group
    )
    parts |= _parts_of(
        {row: one for row, one in tensors.items() if row.partition_dim >= 0 and row.expert}, run.etp_group
    )
    whole = {row: unshard(row, some) for row, some in parts.items()}
    spread = _parts_of({row: one for row, one in whole.items() if row.expert_dim == 0}, run.ep_group)
    return {row.init_key: torch.cat(spread[row]) if row in spread else one for row, one in whole.items()}


def _parts_of(
    tensors: Mapping[ParamRow, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[ParamRow, list[torch.Tensor]]:
    """What every rank of a group has of each tensor, in rank order."""
    if not tensors:
        return {}
    assert group is not None, "a factor is split only in a run with the group"
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    gathered = flat.new_empty(group.size(), flat.numel())
    dist.all_gather_into_tensor(gathered.view(-1), flat, group=group)
    per_rank = [_unflatten(one, [tensor.shape for tensor in tensors.values()]) for one in gathered]
    return {row: [parts[index] for parts in per_rank] for index, row in enumerate(tensors)}


def _over_pipeline_parallel(adapter: LoraAdapter, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    run = adapter.run
    if run.facts.pp == 1:
        return mine
    assert run.pp_group is not None, "a pipelined run has a group"
    device = next((tensor.device for tensor in mine.values()), _device(adapter))
    full: dict[str, torch.Tensor] = {}
    for stage in range(run.facts.pp):
        rows = [row for row in adapter.table.rows if adapter.stages[row.host_module] == stage]
        if not rows:
            continue
        if stage == run.pp_rank:
            flat = torch.cat([mine[row.init_key].reshape(-1) for row in rows])
        else:
            count = sum(math.prod(row.full_shape) for row in rows)
            flat = torch.empty(count, dtype=getattr(torch, rows[0].dtype), device=device)
        dist.broadcast(flat, src=dist.get_global_rank(run.pp_group, stage), group=run.pp_group)
        parts = _unflatten(flat, [row.full_shape for row in rows])
        full |= {row.init_key: part.clone() for row, part in zip(rows, parts, strict=True)}
    return full


def _device(adapter: LoraAdapter) -> torch.device:
    """Device of a stage that holds no factor."""
    return next(parameter.device for chunk in adapter.chunks for parameter in chunk.parameters())


def _unflatten(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
