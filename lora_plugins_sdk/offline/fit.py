"""Which weight of a base each factor pair belongs to, and every reason why one does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.offline.adapter import LoraPair, PlainAdapter
from lora_plugins_sdk.weight_files import WeightFiles

FOLDABLE = ("F64", "F32", "BF16", "F16")
# Modules that share one tensor while the config ties them.
_TIED = ("lm_head", "embed_tokens")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_TAIL = re.compile(r"[^.]+\.\d+\..+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """One delta and where it goes.

    Args:
        pair: the factors; B may have more rows than are folded (`trimmed`).
        tensor: base tensor `[rows of the base, in]`.
        rows: its first rows receive the delta; the rest is vocabulary padding of the base.
        trimmed: zero rows of B beyond the base's vocabulary.
    """

    pair: LoraPair
    tensor: str
    rows: int
    trimmed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hints:
    """What a base has instead of a name it lacks.

    Args:
        tails: name from its first numbered part on (`layers.0.mlp.up_proj.weight`) -> whole name.
        fused: path before `.experts.` -> tensor that holds all its experts.
    """

    tails: Mapping[str, str]
    fused: Mapping[str, str]

    @classmethod
    def of(cls, base: WeightFiles) -> _Hints:
        """Gather them."""
        tails = {found[0]: name for name in base.where if (found := _TAIL.search(name))}
        fused = {
            name.partition(".experts.")[0]: name
            for name in base.where
            if ".experts." in name and len(base.tensor(name).shape) == 3
        }
        return cls(tails=tails, fused=fused)

    def why_absent(self, name: str) -> str:
        """Why the base may lack this tensor."""
        block = name.partition(".experts.")[0]
        if block in self.fused:
            return f"the base stores these experts fused ({self.fused[block]}); a fold needs that model's own layout"
        tail = _TAIL.search(name)
        if tail and tail[0] in self.tails:
            return f"the base has no {name}; it has {self.tails[tail[0]]}"
        tied = "; a base without a head of its own ties it to the embedding" if name.startswith("lm_head.") else ""
        return f"the base has no {name}{tied}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """An adapter against a base: a fold for each pair that fits, a problem for whatever does not."""

    folds: tuple[Fold, ...]
    problems: tuple[Diagnostic, ...]


def fit(adapter: PlainAdapter, base: WeightFiles, hf_config: Mapping[str, Any]) -> Fit:
    """Find every pair's base tensor by its exact name.

    Args:
        adapter: the checked adapter.
        base: the base's weights.
        hf_config: the base's `config.json`.
    """
    folds: list[Fold] = []
    problems: list[Diagnostic] = []
    hints = _Hints.of(base)
    for pair in adapter.pairs.values():
        found = _place(pair, base, hf_config, hints)
        if isinstance(found, Fold):
            folds.append(found)
        else:
            problems.append(found)
    problems += [*_left_out(adapter, base), *_trained_wholes(adapter, base)]
    return Fit(folds=tuple(folds), problems=tuple(problems))


def kind_of(module: str) -> str:
    """The module's path with `*` for each number: `model.layers.*.mlp.up_proj`."""
    return _NUMBER.sub("*", module)


def _place(pair: LoraPair, base: WeightFiles, hf_config: Mapping[str, Any], hints: _Hints) -> Fold | Diagnostic:
    name = f"{pair.module}.weight"
    leaf = pair.module.rsplit(".", 1)[-1]
    if leaf in _TIED and True in _values(hf_config, "tie_word_embeddings"):
        return Diagnostic(
            subject=pair.module,
            reason="the config sets tie_word_embeddings: head and embedding are one tensor, and a fold into it would "
            "change both",
            cure="train without this target, or untie the base first (save both weights, tie_word_embeddings false)",
        )
    if name not in base.where:
        return Diagnostic(subject=pair.module, reason=hints.why_absent(name), cure="give the base it was made for")
    stored = base.tensor(name)
    out, width = pair.b.shape[0], pair.a.shape[1]
    if stored.dtype not in FOLDABLE:
        return Diagnostic(
            subject=name,
            reason=f"is stored as {stored.dtype}: adding to quantised numbers would give others",
            cure=f"merge into the unquantised base ({', '.join(FOLDABLE)}) and quantise the result",
        )
    if stored.shape == (out, width):
        return Fold(pair=pair, tensor=name, rows=out, trimmed=0)
    if len(stored.shape) == 2 and stored.shape[1] == width:
        padded = _padded_vocabulary(pair, name, stored.shape[0], _values(hf_config, "vocab_size"))
        if padded is not None:
            return padded
    transposed = " (transposed: such a base stores [in, out])" if stored.shape == (width, out) else ""
    return Diagnostic(
        subject=name,
        reason=f"has shape {list(stored.shape)}, the adapter's product is [{out}, {width}]{transposed}",
        cure="give the base it was made for",
    )


def _padded_vocabulary(pair: LoraPair, name: str, base_rows: int, vocabulary: list[object]) -> Fold | Diagnostic | None:
    """A vocabulary padded on one side. Padding of B is dropped only when it is zero; padding of the base is kept."""
    out = pair.b.shape[0]
    if base_rows in vocabulary and out > base_rows:
        extra = int((pair.b[base_rows:] != 0).any(dim=1).sum())
        if extra:
            return Diagnostic(
                subject=pair.module,
                reason=f"{extra} of the {out - base_rows} rows of lora_B beyond the base's {base_rows} are not zero",
                cure="give the base with the extended vocabulary that it was trained on",
            )
        return Fold(pair=pair, tensor=name, rows=base_rows, trimmed=out - base_rows)
    if out in vocabulary and out < base_rows:
        return Fold(pair=pair, tensor=name, rows=out, trimmed=0)
    return None


def _values(hf_config: Mapping[str, Any], key: str) -> list[object]:
    """A key of the config and of its `text_config`, where multimodal configs keep it."""
    return [part[key] for part in (hf_config, hf_config.get("text_config")) if isinstance(part, dict) and key in part]


def _left_out(adapter: PlainAdapter, base: WeightFiles) -> Iterator[Diagnostic]:
    """Layers that the config's targets name and the adapter lacks while it has others of their kind: a part was lost.

    PEFT reads a target as a whole path or its end. A pattern is not followed: it may select layers on purpose.
    """
    named, excluded = adapter.config.get("target_modules"), adapter.config.get("exclude_modules")
    if not isinstance(named, list) or excluded or adapter.config.get("layers_to_transform") is not None:
        return
    targets = {target for target in named if isinstance(target, str)}
    kinds = {kind_of(module) for module in adapter.pairs}
    for name in sorted(base.where):
        module = name.removesuffix(".weight")
        if module == name or module in adapter.pairs or kind_of(module) not in kinds:
            continue
        parts = module.split(".")
        if any(".".join(parts[start:]) in targets for start in range(len(parts))):
            yield Diagnostic(
                subject=module,
                reason="is a target of the adapter's config and has no factors, while other layers have",
                cure="export the whole adapter again (every pipeline stage), or correct target_modules",
            )


def _trained_wholes(adapter: PlainAdapter, base: WeightFiles) -> Iterator[Diagnostic]:
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
