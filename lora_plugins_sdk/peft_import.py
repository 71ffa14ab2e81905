"""From PEFT tensors into an attached adapter: everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from lora_plugins_sdk.adapter import LoraAdapter, Model, adapter_of
from lora_plugins_sdk.adapter_meta import engine_problems
from lora_plugins_sdk.arguments import expect, expect_model
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.own_base import other_than_the_base
from lora_plugins_sdk.padded_rows import without_padding
from lora_plugins_sdk.peft_config import plain_lora_problems, whole_weights
from lora_plugins_sdk.peft_files import PeftAdapter
from lora_plugins_sdk.peft_names import factor_name
from lora_plugins_sdk.scatter import scatter_factors
from lora_plugins_sdk.site import packed_name
from lora_plugins_sdk.table import ParamRow


def import_adapter(model: Model, saved: PeftAdapter) -> None:
    """Load an adapter into the attached one: the exact inverse of `export_adapter`. Every rank calls it with the whole
    adapter. Whole base weights that PEFT saved along are compared with the base, and not loaded.

    Args:
        model: the model an adapter is attached to.
        saved: config and full tensors (`read_adapter(directory)`), named as an export or by a schema that the
            plugin knows.

    Raises:
        LoraError: nothing was written. Lists every difference: rank, alpha, rsLoRA or variant in the config; tensors
            that are
            missing, left over, transposed, of another rank or shape, not floating point, or not finite; whole weights
            that are not the base's own; a delta of a projection that this run holds at zero.
    """
    expect_model(model)
    expect("saved", saved, PeftAdapter, cure="read it first: read_adapter(directory)")
    adapter = adapter_of(model)
    try:
        saved = adapter.plugin.read_adapter(adapter.hf_config, saved)
        saved = without_padding(saved, adapter.plugin.architecture, adapter.hf_config)
        raise_if_any(
            "this adapter cannot be loaded:",
            [
                *_config_problems(adapter, saved),
                *_tensor_problems(adapter, saved),
                *other_than_the_base(adapter, saved.tensors),
            ],
        )
        fulls = {row: adapter.plugin.import_tensor(row, saved.tensors) for row in adapter.table.rows}
        raise_if_any("this adapter cannot be loaded:", _pinned_content(fulls))
    except Exception as error:
        adapter.plugin.on_error(error, "import")
        raise
    scatter_factors(adapter, fulls)


def _config_problems(adapter: LoraAdapter, saved: PeftAdapter) -> Iterator[Diagnostic]:
    lora, config = adapter.table.lora, saved.config
    yield from engine_problems("this adapter", saved.origin)
    yield from plain_lora_problems(config)
    expected = {"r": lora.rank, "lora_alpha": lora.alpha}
    for key, value in expected.items():
        if config.get(key) != value:
            yield Diagnostic(
                subject=f"{key}={config.get(key)!r}",
                reason=f"the attached adapter has {value!r}",
                cure="attach with the LoRA options that the adapter was trained with",
            )
    if bool(config.get("use_rslora", False)) != lora.use_rslora:
        yield Diagnostic(
            subject=f"use_rslora={bool(config.get('use_rslora', False))}",
            reason=f"the attached adapter has {lora.use_rslora}, which scales the delta differently",
            cure="attach with the same use_rslora",
        )


def _tensor_problems(adapter: LoraAdapter, saved: PeftAdapter) -> Iterator[Diagnostic]:
    expected: dict[str, tuple[int, ...]] = {}
    for row in adapter.table.rows:
        named: Mapping[str, torch.Tensor] = adapter.plugin.export_tensor(
            row, torch.empty(row.full_shape, device="meta")
        )
        expected |= {name: tuple(tensor.shape) for name, tensor in named.items()}
    other_sharing = list(_other_sharing(adapter, saved.tensors))
    if other_sharing:
        yield from other_sharing
        return
    yield from _names(expected, saved.tensors.keys() - whole_weights(saved.tensors).keys())
    rank = adapter.table.lora.rank
    saved_rank = saved.config.get("r")
    for name in sorted(expected.keys() & saved.tensors.keys()):
        implied = tuple(saved_rank if size == rank else size for size in expected[name])
        # The config's rank is reported already; a tensor of that rank adds nothing.
        if tuple(saved.tensors[name].shape) != implied or saved_rank == rank:
            yield from _content(name, saved.tensors[name], expected[name], rank)


def _other_sharing(adapter: LoraAdapter, tensors: Mapping[str, torch.Tensor]) -> Iterator[Diagnostic]:
    """Experts saved one by one where the attached adapter has them together, or the other way round."""
    for row in adapter.table.rows:
        name = factor_name(row.hf_module, row.factor)
        other = name.format(expert=0) if row.packed else packed_name(name)
        if row.expert and other in tensors and row.hf_name.format(expert=0) not in tensors:
            sharing = "none" if row.packed else "outer"
            yield Diagnostic(
                subject=other,
                reason=f"holds experts as expert_sharing={sharing!r} has them, the attached adapter does not",
                cure=f"attach with expert_sharing={sharing!r}",
            )
            return


def _pinned_content(fulls: Mapping[ParamRow, torch.Tensor]) -> Iterator[Diagnostic]:
    for row, full in fulls.items():
        if row.pinned and row.initially_zero and bool(full.any()):
            yield Diagnostic(
                subject=row.hf_name,
                reason=f"has a delta for {row.hf_module}, which this run holds at zero (pinned_modules): the policy "
                "would not be the saved one",
                cure="serve the policy merged into the base and leave the pin out, or merge this adapter into the base "
                "(`lora-plugins merge`) and train a new one on that",
            )


def _names(expected: Iterable[str], found: Iterable[str]) -> Iterator[Diagnostic]:
    expected, found = set(expected), set(found)
    for name in sorted(expected - found):
        yield Diagnostic(
            subject=name,
            reason="is missing from the adapter",
            cure="load a complete adapter, or attach with the target_modules it was trained with",
        )
    for name in sorted(found - expected):
        yield Diagnostic(
            subject=name,
            reason="has no place in the attached adapter and would be dropped",
            cure="attach with the target_modules it was trained with",
        )


def _content(name: str, tensor: torch.Tensor, shape: tuple[int, ...], rank: int) -> Iterator[Diagnostic]:
    found = tuple(tensor.shape)
    if found != shape:
        if found == (*shape[:-2], shape[-1], shape[-2]):
            reason, cure = "is transposed", "save A as [rank, in] and B as [out, rank], experts before them"
        elif rank in shape and len(found) == len(shape) and rank not in found:
            reason, cure = f"is of another rank than {rank}", "attach with the adapter's own rank"
        else:
            reason, cure = "is of another size", "use an adapter trained on this base model"
        yield Diagnostic(subject=name, reason=f"{reason}: shape {list(found)}, expected {list(shape)}", cure=cure)
    elif not tensor.is_floating_point():
        yield Diagnostic(subject=name, reason=f"has dtype {tensor.dtype}", cure="save it in a floating point dtype")
    elif not bool(torch.isfinite(tensor).all()):
        yield Diagnostic(
            subject=name,
            reason="holds NaN or infinite values",
            cure="use an earlier checkpoint of the adapter",
        )
