"""What leaves and what enters: tensors skipped, stale, shared, padded, joined or cut in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk import (
    LoraAdapter,
    ParallelRun,
    ParamRow,
    SelectedPlugin,
    gather,
    peft_export,
    peft_import,
    scatter,
)
from lora_plugins_sdk.factors import LoraFactors
from mutants.mutant import seeded
from mutants.places import FC1, HEAD, PP2, PROJ, QKV, TP2, TP2_SP
from mutants.seams import wrapped


def _key(row: ParamRow, module: str, factor: str) -> bool:
    return (row.host_module, row.factor) == (module, factor)


@seeded("round-trip", imitates="B36", site=PROJ, factor="B", words="a tensor is skipped")
def one_tensor_skipped() -> Iterator[None]:
    """The export leaves one tensor out."""

    def skip(right: Any, adapter: Any, *of: Any) -> dict[ParamRow, torch.Tensor]:
        return {row: tensor for row, tensor in right(adapter, *of).items() if not _key(row, PROJ, "B")}

    with wrapped(peft_export, "gather_factors", skip):
        yield


@seeded("round-trip", imitates="B24", site=FC1, factor="B", words="it is a view")
def export_shares_memory() -> Iterator[None]:
    """An exported tensor is the parameter's own memory."""

    def share(right: Any, adapter: Any, *of: Any) -> dict[str, torch.Tensor]:
        own = {
            row.init_key: one.local(row) for one in adapter.factors() for row in one.plan.rows if _key(row, FC1, "B")
        }
        return right(adapter, *of) | own

    with wrapped(gather, "_of_stage", share):
        yield


@seeded("import-export", TP2, imitates="B23", site=FC1, factor="B", words="halves")
def shards_joined_in_the_wrong_order() -> Iterator[None]:
    """The gathered shards of one B are joined last rank first."""

    def swap(right: Any, adapter: Any, *of: Any) -> dict[str, torch.Tensor]:
        full = right(adapter, *of)
        keys = [row.init_key for row in adapter.table.rows if _key(row, FC1, "B")] if adapter.run.facts.tp > 1 else []
        return full | {key: torch.cat(full[key].chunk(2)[::-1]) for key in keys}

    with wrapped(gather, "_of_stage", swap):
        yield


@seeded("import-export", TP2, imitates="B42", site=HEAD, factor="B", words="[62, 8] instead of [61, 8]")
def padding_exported() -> Iterator[None]:
    """The rows by which TP pads the vocabulary are exported."""

    def pad(right: Any, adapter: Any, *of: Any) -> dict[str, torch.Tensor]:
        full, rank = right(adapter, *of), adapter.table.lora.rank
        keys = [row.init_key for row in adapter.table.rows if _key(row, HEAD, "B")] if adapter.run.facts.tp > 1 else []
        return full | {key: torch.cat([full[key], torch.zeros(1, rank)]) for key in keys}

    with wrapped(gather, "_of_stage", pad):
        yield


@seeded("logits", TP2_SP, subject="inkling", site=HEAD, words="padding are not zero")
@seeded("logits", TP2, imitates="B42", site=HEAD, words="padding are not zero")
def padding_filled() -> Iterator[None]:
    """An import fills the row by which TP pads the vocabulary with the last token's."""

    def fill(right: Any, row: ParamRow, full: torch.Tensor, run: ParallelRun) -> torch.Tensor:
        local = right(row, full, run)
        if _key(row, HEAD, "B") and run.tp_rank == run.facts.tp - 1 > 0:
            return torch.cat([local[:-1], local[-2:-1]])
        return local

    with wrapped(scatter, "shard", fill):
        yield


@seeded("import-export", PP2, imitates="B22", site="decoder.layers.[23].*", words="is missing")
def one_stage_exported() -> Iterator[None]:
    """The export holds the layers of the first pipeline stage only."""

    def first_stage(right: Any, adapter: Any, *of: Any) -> dict[ParamRow, torch.Tensor]:
        full = right(adapter, *of)
        return {row: full[row] for row in full if adapter.stages[row.host_module] == 0 or row.host_module == HEAD}

    with wrapped(peft_export, "gather_factors", first_stage):
        yield


@seeded("import-export", PP2, imitates="B14", site=QKV, factor="A")
def stale_export() -> Iterator[None]:
    """One tensor is exported as it was at the first export."""
    first: dict[str, torch.Tensor] = {}

    def keep(right: Any, adapter: Any, *of: Any) -> dict[ParamRow, torch.Tensor]:
        full = right(adapter, *of)
        return {
            row: first.setdefault(row.init_key, tensor.clone()) if _key(row, QKV, "A") else tensor
            for row, tensor in full.items()
        }

    with wrapped(peft_export, "gather_factors", keep):
        yield


@seeded("trained-export", PP2, imitates="B14", site=QKV, factor="A")
def export_from_before_the_steps() -> Iterator[None]:
    """One tensor is exported as it was imported, whatever was trained since."""
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(right: Any, adapter: Any, *of: Any) -> dict[ParamRow, torch.Tensor]:
        full = right(adapter, *of)
        for row, tensor in full.items():
            if _key(row, QKV, "A"):
                past = seen.setdefault(row.init_key, [])
                past.append(tensor.clone())
                full[row] = past[:2][-1]
        return full

    with wrapped(peft_export, "gather_factors", keep):
        yield


@seeded("round-trip", imitates="B32", site=FC1, factor="B")
def export_transposed_in_memory() -> Iterator[None]:
    """One B is exported with its memory read as the transpose; the shape fits."""

    def turn(right: Any, adapter: Any, *of: Any) -> dict[ParamRow, torch.Tensor]:
        full = right(adapter, *of)
        return {
            row: one.reshape(one.shape[::-1]).t().contiguous() if _key(row, FC1, "B") else one
            for row, one in full.items()
        }

    with wrapped(peft_export, "gather_factors", turn):
        yield


@seeded("round-trip", imitates="B14", site=PROJ, factor="B")
def import_keeps_old_values() -> Iterator[None]:
    """An import does not reach one factor, which keeps what it held."""

    def copied(right: Any, factors: LoraFactors, row: ParamRow, *of: Any) -> torch.Tensor:
        return right(factors, row, *of).clone() if _key(row, PROJ, "B") else right(factors, row, *of)

    with wrapped(LoraFactors, "local", copied):
        yield


class _Replacing(LoraAdapter):
    """An adapter that puts new parameters at one site before it hands its factors out."""

    def factors(self) -> Iterator[LoraFactors]:
        for factors in super().factors():
            if factors.plan.host_module == FC1:
                for name, old in list(factors.named_parameters()):
                    new = nn.Parameter(old.detach().clone())
                    vars(new).update(vars(old))
                    setattr(factors, name, new)
            yield factors


@seeded("round-trip", imitates="B14", site=FC1)
def import_replaces_the_parameters() -> Iterator[None]:
    """An import puts new parameters in the place of those that the optimizer and the gradient buffers hold."""

    def replacing(right: Any, model: Any) -> LoraAdapter:
        adapter = right(model)
        return _Replacing(**{field.name: getattr(adapter, field.name) for field in fields(adapter)})

    with wrapped(peft_import, "adapter_of", replacing):
        yield


@seeded("fold", imitates="B2", site=FC1)
def stacked_in_another_order() -> Iterator[None]:
    """Gate's and up's A are stored in the other order than the branch reads them."""

    def other(right: Any, factors: LoraFactors, row: ParamRow, *of: Any) -> torch.Tensor:
        at = row.local_shape[0] - row.stacked_at
        return right(factors, replace(row, stacked_at=at) if _key(row, FC1, "A") else row, *of)

    with wrapped(LoraFactors, "local", other):
        yield


@seeded("import-export", TP2, imitates="shard of another rank", site=PROJ, factor="A", words="halves")
def import_cuts_the_other_rank_s_shard() -> Iterator[None]:
    """Each TP rank loads the shard of the other one."""

    def cut(right: Any, row: ParamRow, full: torch.Tensor, run: ParallelRun) -> torch.Tensor:
        split = row.full_shape[1] != row.local_shape[1]
        return right(row, full, replace(run, tp_rank=1 - run.tp_rank) if _key(row, PROJ, "A") and split else run)

    with wrapped(scatter, "shard", cut):
        yield


@seeded("incomplete-import", imitates="B28, B29, B36", site="*", words="is accepted")
def missing_tensors_are_zeros() -> Iterator[None]:
    """An adapter that lacks tensors is loaded, with zeros in their place."""

    def filled(right: Any, plugin: SelectedPlugin, row: ParamRow, tensors: Any) -> torch.Tensor:
        return right(plugin, row, tensors) if row.hf_name in tensors else torch.zeros(row.full_shape)

    with (
        wrapped(peft_import, "_tensor_problems", lambda right, adapter, saved: ()),
        wrapped(SelectedPlugin, "import_tensor", filled),
    ):
        yield
