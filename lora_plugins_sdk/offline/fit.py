"""Which weight of a base each factor pair belongs to, and every reason why one does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.offline.adapter import LoraPair, PlainAdapter
from lora_plugins_sdk.offline.embeddings import declared_embeddings, other_kind
from lora_plugins_sdk.offline.places import BasePlaces, Place
from lora_plugins_sdk.weight_files import WeightFiles

FOLDABLE = ("F64", "F32", "BF16", "F16")
# Modules that share one tensor while the config ties them.
_TIED = ("lm_head", "embed_tokens")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """One delta and where it goes.

    Args:
        pair: the factors; `b` may have more rows than are folded (`trimmed`).
        tensor: base tensor that holds the weight.
        first: first of its rows that receives the delta, all dimensions but the last counted as rows.
        step: distance from one of them to the next.
        rows: how many receive it; rows of the weight beyond are vocabulary padding of the base.
        trimmed: zero rows of `b` beyond the base's vocabulary.
    """

    pair: LoraPair
    tensor: str
    first: int
    step: int
    rows: int
    trimmed: int

    @property
    def stop(self) -> int:
        """Row after the last one that receives it."""
        return self.first + (self.rows - 1) * self.step + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """An adapter against a base: a fold for each pair that fits, a problem for whatever does not."""

    folds: tuple[Fold, ...]
    problems: tuple[Diagnostic, ...]


def fit(adapter: PlainAdapter, base: WeightFiles, hf_config: Mapping[str, Any], *, folding: bool = True) -> Fit:
    """Find the place of every pair's weight in the base.

    Args:
        adapter: the checked adapter.
        base: the base's weights.
        hf_config: the base's `config.json`.
        folding: whether the pairs are to be folded in. If not, a tied weight is no problem.
    """
    folds: list[Fold] = []
    problems: list[Diagnostic] = []
    places, embeddings = BasePlaces(base), declared_embeddings(hf_config)
    users: dict[str, str] = {}
    blocks = set()
    for pair in adapter.pairs.values():
        place = places.find(pair.module)
        kind = other_kind(pair.module, adapter.config, embedding=pair.embedding, declared=embeddings)
        tied = _tied(pair.module, hf_config, places)
        if tied is not None and place is None and not folding:
            place = _the_others(pair.module, places)
        found = kind or (tied if folding else None) or _fold(pair, place, base, hf_config, places)
        if place is not None and place.experts:
            blocks.add(place.tensor.rsplit(".", 1)[0])
        if isinstance(found, Diagnostic):
            problems.append(found)
            continue
        assert place is not None
        folds.append(found)
        if users.setdefault(place.module, pair.module) != pair.module:
            problems.append(
                Diagnostic(
                    subject=pair.module,
                    reason=f"and {users[place.module]} are both {place.module} of this base",
                    cure="export the adapter again with one name for each module",
                )
            )
    problems += [
        *(one for block in sorted(blocks) for one in _turned(block, base)),
        *_left_out(adapter, places, set(users)),
        *trained_wholes(adapter, base),
    ]
    return Fit(folds=tuple(folds), problems=tuple(problems))


def by_tensor(folds: Iterable[Fold]) -> dict[str, tuple[Fold, ...]]:
    """Base tensor -> the folds into it, sorted by their first row."""
    grouped: dict[str, list[Fold]] = {}
    for fold in sorted(folds, key=lambda one: one.first):
        grouped.setdefault(fold.tensor, []).append(fold)
    return {tensor: tuple(many) for tensor, many in grouped.items()}


def kind_of(module: str) -> str:
    """The module's path with `*` for each number: `model.layers.*.mlp.up_proj`."""
    return _NUMBER.sub("*", module)


def _fold(
    pair: LoraPair, place: Place | None, base: WeightFiles, hf_config: Mapping[str, Any], places: BasePlaces
) -> Fold | Diagnostic:
    if place is None:
        return Diagnostic(
            subject=pair.module, reason=places.why_absent(pair.module), cure="give the base it was made for"
        )
    stored, name = base.tensor(place.tensor), place.tensor
    out, width = pair.b.shape[0], pair.a.shape[1]
    if stored.dtype not in FOLDABLE:
        return Diagnostic(
            subject=name,
            reason=f"is stored as {stored.dtype}: adding to quantised numbers would give others",
            cure=f"merge into the unquantised base ({', '.join(FOLDABLE)}) and quantise the result",
        )
    if len(stored.shape) == 2 + place.experts and (place.rows, place.columns) == (out, width):
        return Fold(pair=pair, tensor=name, first=place.first, step=place.step, rows=out, trimmed=0)
    if len(stored.shape) == 2 and place.columns == width and place.step == 1:
        vocabulary = [*config_values(hf_config, "vocab_size"), *config_values(hf_config, "unpadded_vocab_size")]
        padded = _padded_vocabulary(pair, name, place.rows, vocabulary)
        if padded is not None:
            return padded
    turned = stored.shape[-2:] in ((width, out), (width, 2 * out))
    transposed = " (transposed: such a base stores [in, out])" if turned else ""
    return Diagnostic(
        subject=name,
        reason=f"has shape {list(stored.shape)}, the adapter's product is [{out}, {width}]{transposed}",
        cure="give the base it was made for",
    )


def _tied(module: str, hf_config: Mapping[str, Any], places: BasePlaces) -> Diagnostic | None:
    leaf, flags = module.rsplit(".", 1)[-1], config_values(hf_config, "tie_word_embeddings")
    # What older transformers make of a config that does not say.
    headless = leaf == "embed_tokens" and not flags and places.find("lm_head") is None
    if not headless and (leaf not in _TIED or True not in flags):
        return None
    why = "the base has no lm_head.weight, and its config no" if headless else "the config sets"
    return Diagnostic(
        subject=module,
        reason=f"{why} tie_word_embeddings: head and embedding are one tensor, and a fold into it would change both",
        cure="train without this target, or untie the base first (save both weights, tie_word_embeddings false)",
    )


def _the_others(module: str, places: BasePlaces) -> Place | None:
    """The place of a tied head in a base that stores the embedding alone, or of an embedding where it is the head's."""
    head, embedding = _TIED
    other = places.find(f"model.{embedding}" if module.endswith(head) else head)
    return None if other is None else replace(other, module=module)


def _padded_vocabulary(pair: LoraPair, name: str, base_rows: int, vocabulary: list[object]) -> Fold | Diagnostic | None:
    """A vocabulary padded on one side. The adapter's padding is dropped only when it is zero; the base's is kept."""
    out = pair.b.shape[0]
    if base_rows in vocabulary and out > base_rows:
        extra = int((pair.b[base_rows:] != 0).any(dim=1).sum())
        if extra:
            part = "columns of lora_embedding_A" if pair.embedding else "rows of lora_B"
            return Diagnostic(
                subject=pair.module,
                reason=f"{extra} of the {out - base_rows} {part} beyond the base's {base_rows} are not zero",
                cure="give the base with the extended vocabulary that it was trained on",
            )
        return Fold(pair=pair, tensor=name, first=0, step=1, rows=base_rows, trimmed=out - base_rows)
    if out in vocabulary and out < base_rows:
        return Fold(pair=pair, tensor=name, first=0, step=1, rows=out, trimmed=0)
    return None


def config_values(hf_config: Mapping[str, Any], key: str) -> list[object]:
    """A key of the config and of its `text_config`, where multimodal configs keep it."""
    return [part[key] for part in (hf_config, hf_config.get("text_config")) if isinstance(part, dict) and key in part]


def _turned(block: str, base: WeightFiles) -> Iterator[Diagnostic]:
    """Fused experts whose tensors are not all `[experts, out, in]`; square ones tell by the others of their block."""
    both = base.where.get(f"{block}.gate_up_proj") is not None
    up = f"{block}.gate_up_proj" if both else f"{block}.up_proj"
    down = f"{block}.down_proj"
    if up not in base.where or down not in base.where:
        return
    experts, rows, columns = base.tensor(up).shape
    found, expected = base.tensor(down).shape, (experts, columns, rows // (1 + both))
    if found != expected:
        yield Diagnostic(
            subject=down,
            reason=f"has shape {list(found)}; beside {up} {[experts, rows, columns]} it would be {list(expected)} "
            "if both were [experts, out, in]",
            cure="store the experts as [experts, out, in], as transformers does for this kind of model",
        )


def _left_out(adapter: PlainAdapter, places: BasePlaces, adapted: set[str]) -> Iterator[Diagnostic]:
    """Layers that the config's targets name and the adapter lacks while it has others of their kind: a part was lost.

    PEFT reads a target as a whole path or its end. A pattern is not followed: it may select layers on purpose.
    """
    named, excluded = adapter.config.get("target_modules"), adapter.config.get("exclude_modules")
    if not isinstance(named, list) or excluded or adapter.config.get("layers_to_transform") is not None:
        return
    targets = {target for target in named if isinstance(target, str)}
    kinds = {kind_of(module) for module in adapted}
    for module in sorted(places.places.keys() - adapted):
        if kind_of(module) not in kinds:
            continue
        parts = module.split(".")
        if any(".".join(parts[start:]) in targets for start in range(len(parts))):
            yield Diagnostic(
                subject=module,
                reason="is a target of the adapter's config and has no factors, while other layers have",
                cure="export the whole adapter again (every pipeline stage), or correct target_modules",
            )


def trained_wholes(adapter: PlainAdapter, base: WeightFiles) -> Iterator[Diagnostic]:
    """Whole weights in the adapter that are not the base's own: trained, or of another base."""
    for name, tensor in sorted(adapter.wholes.items()):
        if name not in base.where or not _is_copy(tensor, name, base):
            yield Diagnostic(
                subject=name,
                reason="is in the adapter as a whole weight, and not as the base has it",
                cure="save the adapter without it (PEFT: save_embedding_layers=False) if it was not trained",
            )


def _is_copy(tensor: Tensor, name: str, base: WeightFiles) -> bool:
    if base.tensor(name).shape != tuple(tensor.shape) or base.tensor(name).dtype not in FOLDABLE:
        return False
    with safe_open(base.directory / base.where[name], framework="pt") as file:
        return torch.equal(file.get_tensor(name).to(tensor.dtype), tensor)
