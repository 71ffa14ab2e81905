"""Before anything is changed: every rank must have derived the same table, and together they must hold all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hookspecs import HOOKSPEC_API
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.table import ParameterTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What one rank is about to do.

    Args:
        plugin: name of the selected plugin.
        version: its version.
        api: hook specification.
        table: digest of the parameter table.
        modules: host modules that this rank holds, sorted.
        error: why this rank cannot attach; empty when it can.
    """

    plugin: str
    version: str
    api: tuple[int, int] = HOOKSPEC_API
    table: str = ""
    modules: tuple[str, ...] = ()
    error: str = ""


def agree(claim: Claim, run: ParallelRun) -> list[Claim]:
    """Compare claims over all ranks of the run; collective, and the same verdict on every rank.

    Args:
        claim: this rank's.
        run: this rank's groups.

    Returns:
        One claim per pipeline stage.

    Raises:
        LoraError: a rank cannot attach, or ranks differ in plugin, version, table or, within a stage, modules.
    """
    # Group after group, so that every rank hears of every other, also of those it shares no group with.
    over_tp = _gather(claim, run.tp_group)
    over_pp = _gather(over_tp, run.pp_group)
    over_dp = _gather(over_pp, run.dp_group)
    claims = [
        (f"rank (dp {dp}, pp {pp}, tp {tp})", pp, one)
        for dp, stages in enumerate(over_dp)
        for pp, shards in enumerate(stages)
        for tp, one in enumerate(shards)
    ]
    for rank, _, one in claims:
        if one.error:
            raise LoraError(rank, reason=f"cannot attach: {one.error}", cure="every rank must be able to")
    stages = over_dp[0]
    for rank, stage, one in claims:
        expected = stages[stage][0]
        different = [name for name in _names() if getattr(one, name) != getattr(stages[0][0], name)]
        if different:
            raise LoraError(
                rank,
                reason=f"differs from rank (dp 0, pp 0, tp 0) in {', '.join(different)}: "
                + ", ".join(f"{getattr(one, name)} against {getattr(stages[0][0], name)}" for name in different),
                cure="start every rank with the same package versions, config.json, LoRA options and run facts",
            )
        if one.modules != expected.modules:
            raise LoraError(
                rank,
                reason=f"holds other modules than rank (dp 0, pp {stage}, tp 0)",
                cure="build the same pipeline stage on all ranks of one tensor and data parallel group",
            )
    return [shards[0] for shards in stages]


def from_all_ranks(item: Any, run: ParallelRun) -> list[Any]:
    """What every rank of the run says, the same list on each. Collective."""
    over_dp = _gather(_gather(_gather(item, run.tp_group), run.pp_group), run.dp_group)
    return [one for stages in over_dp for shards in stages for one in shards]


def place_on_stages(table: ParameterTable, stages: Sequence[Claim]) -> dict[str, int]:
    """Pipeline stage of every host module of the table.

    Args:
        table: the whole model's.
        stages: one claim per stage.

    Raises:
        LoraError: a host module is on no stage or on several.
    """
    places = [(module, stage) for stage, claim in enumerate(stages) for module in claim.modules]
    count = Counter(module for module, _ in places)
    missing = [plan.host_module for plan in table.plans if count[plan.host_module] == 0]
    repeated = [module for module, times in count.items() if times > 1]
    if missing or repeated:
        what, reason = (missing, "is on no pipeline stage") if missing else (repeated, "is on several pipeline stages")
        raise LoraError(
            f"{what[0]}" + (f" and {len(what) - 1} more" if len(what) > 1 else ""),
            reason=f"{reason}, so its adapter could not be trained or exported",
            cure="check that the model was built from this config.json, and pass every model chunk of this rank",
        )
    return dict(places)


def claim_of(plugin: SelectedPlugin, table: ParameterTable, modules: Sequence[str]) -> Claim:
    """The claim of a rank that can attach."""
    return Claim(plugin=plugin.name, version=plugin.version, table=table.digest(), modules=tuple(sorted(modules)))


def _names() -> list[str]:
    return [field.name for field in fields(Claim) if field.name not in ("modules", "error")]


def _gather(item: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None or group.size() == 1:
        return [item]
    items: list[Any] = [None] * group.size()
    dist.all_gather_object(items, item, group=group)
    return items
