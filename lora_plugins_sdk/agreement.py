"""Before step 0: every rank must have derived the same table, and together they must hold all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hookspecs import HOOKSPEC_API
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.table import ParameterTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What ranks compare."""

    plugin: str
    version: str
    api: tuple[int, int]
    table: str


def agree(plugin: SelectedPlugin, table: ParameterTable, run: ParallelRun, held: Iterable[str]) -> dict[str, int]:
    """Compare plugin, version and table over all groups; collective over every rank of the run.

    Args:
        plugin: the selected plugin.
        table: this rank's table.
        run: this rank's groups.
        held: host modules that this rank holds.

    Returns:
        Pipeline stage of every host module of the table.

    Raises:
        LoraError: ranks differ; a host module is on no stage or on several.
    """
    mine = Identity(plugin=plugin.name, version=plugin.version, api=HOOKSPEC_API, table=table.digest())
    held = sorted(held)
    stages = _gather((mine, held), run.pp_group)
    for name, peers in (
        ("tensor parallel", _gather((mine, held), run.tp_group)),
        ("data parallel", _gather((mine, held), run.dp_group)),
        ("pipeline parallel", stages),
    ):
        _compare(name, peers, mine, same_modules=None if name == "pipeline parallel" else held)
    places = [(module, stage) for stage, (_, modules) in enumerate(stages) for module in modules]
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


def _gather(item: tuple[Identity, list[str]], group: dist.ProcessGroup | None) -> list[tuple[Identity, list[str]]]:
    if group is None or group.size() == 1:
        return [item]
    items: list = [None] * group.size()
    dist.all_gather_object(items, item, group=group)
    return items


def _compare(
    group: str, peers: list[tuple[Identity, list[str]]], mine: Identity, same_modules: list[str] | None
) -> None:
    for rank, (identity, modules) in enumerate(peers):
        if identity != mine:
            fields = [name for name in Identity.__slots__ if getattr(identity, name) != getattr(mine, name)]
            raise LoraError(
                f"{group} rank {rank}",
                reason=f"differs from this rank in {', '.join(fields)}: {identity} against {mine}",
                cure="start every rank with the same package versions, config.json and LoRA options",
            )
        if same_modules is not None and modules != same_modules:
            raise LoraError(
                f"{group} rank {rank}",
                reason="holds other modules than this rank",
                cure="build the same pipeline stage on all ranks of one tensor and data parallel group",
            )
