"""Full factors from their shards: one gather over TP, one broadcast per pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.factors import TensorOf
from lora_plugins_sdk.shards import unshard
from lora_plugins_sdk.table import ParamRow


def gather_factors(adapter: LoraAdapter, of: TensorOf = torch.Tensor.detach) -> dict[ParamRow, torch.Tensor]:
    """Every factor of the model in HF order, `row.full_shape`, on every rank. Collective over the TP and PP groups.

    Args:
        adapter: the attached adapter.
        of: what to gather in place of the factors themselves: a tensor of a parameter's shape and dtype. What an
            optimizer keeps for a factor travels by the factor's own pack.

    Returns:
        Row -> tensor on this rank's device, in table order; no tensor shares memory with the adapter's parameters.
    """
    mine = _over_tensor_parallel(adapter, of)
    full = _over_pipeline_parallel(adapter, mine)
    return {row: full[row.init_key] for row in adapter.table.rows}


def _over_tensor_parallel(adapter: LoraAdapter, of: TensorOf) -> dict[str, torch.Tensor]:
    """Full factors of this stage, by init key."""
    run = adapter.run
    local = {row: factors.local(row, of) for factors in adapter.factors() for row in factors.plan.rows}
    full = {row.init_key: unshard(row, [tensor]) for row, tensor in local.items() if row.partition_dim == -1}
    sharded = {row: tensor for row, tensor in local.items() if row.partition_dim != -1}
    if sharded:
        assert run.tp_group is not None, "a sharded factor exists only in a tensor parallel run"
        flat = torch.cat([tensor.reshape(-1) for tensor in sharded.values()])
        gathered = flat.new_empty(run.facts.tp, flat.numel())
        dist.all_gather_into_tensor(gathered.view(-1), flat, group=run.tp_group)
        per_rank = [_unflatten(one, sharded) for one in gathered]
        for index, row in enumerate(sharded):
            full[row.init_key] = unshard(row, [parts[index] for parts in per_rank])
    return full


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
            count = sum(row.full_shape[0] * row.full_shape[1] for row in rows)
            flat = torch.empty(count, dtype=getattr(torch, rows[0].dtype), device=device)
        dist.broadcast(flat, src=dist.get_global_rank(run.pp_group, stage), group=run.pp_group)
        shapes = [row.full_shape for row in rows]
        parts = flat.split([height * width for height, width in shapes])
        full |= {row.init_key: part.view(row.full_shape).clone() for row, part in zip(rows, parts, strict=True)}
    return full


def _device(adapter: LoraAdapter) -> torch.device:
    """Device of a stage that holds no factor."""
    return next(parameter.device for chunk in adapter.chunks for parameter in chunk.parameters())


def _unflatten(flat: torch.Tensor, rows: Iterable[ParamRow]) -> list[torch.Tensor]:
    shapes = [row.local_shape for row in rows]
    parts = flat.split([height * width for height, width in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
