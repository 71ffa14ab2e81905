"""A plain LoRA adapter from its directory, checked as far as that is possible without its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.offline.embeddings import other_kind
from lora_plugins_sdk.offline.packed import is_packed, packed_problems, unpacked
from lora_plugins_sdk.peft_config import doubled_wholes, read_lora_config, whole_weights
from lora_plugins_sdk.peft_files import PeftAdapter, read_adapter
from lora_plugins_sdk.peft_names import FACTOR, factor_name
from lora_plugins_sdk.selection import load_plugin


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPair:
    """The two factors whose product `B A` is added to one weight as it is stored.

    Args:
        module: HF module, for example `model.layers.0.self_attn.q_proj`.
        a: `[rank, columns of the weight]`.
        b: `[rows of the weight, rank]`.
        embedding: whether the weight is an embedding's `[vocabulary, hidden]`: `a` is then the transpose of the file's
            `lora_embedding_B` and `b` that of its `lora_embedding_A`.
    """

    module: str
    a: Tensor
    b: Tensor
    embedding: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainAdapter:
    """A checked adapter.

    Args:
        directory: where it came from.
        lora: rank, alpha and scale.
        pairs: module -> its factors; one for each expert, also where a tensor holds those of all experts.
        wholes: base tensor name -> whole weight that was saved along; only a copy of the base's own means nothing.
        saved: config and tensors as they were read.
    """

    directory: Path
    lora: LoraConfig
    pairs: Mapping[str, LoraPair]
    wholes: Mapping[str, Tensor]
    saved: PeftAdapter

    @property
    def config(self) -> Mapping[str, Any]:
        """`adapter_config.json`."""
        return self.saved.config


def read_plain_adapter(directory: str | Path, base: str | Path | None = None) -> PlainAdapter:
    """Read a PEFT directory that holds plain LoRA and nothing else.

    Args:
        directory: the adapter's.
        base: HF directory of its base, if it is known; see `in_hf_names`.

    Raises:
        LoraError: a file is missing or damaged, the config means another method, or tensors are not factor pairs of
            the config's rank with finite values; every problem of one kind is listed.
    """
    directory = Path(directory)
    saved = read_adapter(directory)
    return plain_adapter(saved if base is None else in_hf_names(saved, base), directory)


def in_hf_names(saved: PeftAdapter, base: str | Path, *, plugin: str | None = None) -> PeftAdapter:
    """An adapter under HF's names, where it has those of another schema that the plugin of its base's model knows.

    It stays as it is without such a plugin. The names of an engine's own form are no schema.

    Args:
        saved: as it was read.
        base: HF directory of its base.
        plugin: the plugin that serves the base's model, where several do.

    Raises:
        LoraError: the base's config cannot be read, or two tensors are one under HF's names.
    """
    hf_config = read_hf_config(base)
    if saved.origin is not None and saved.origin.engine is not None:
        return saved
    try:
        selected = load_plugin(str(hf_config.get("model_type")), plugin=plugin)
    except LoraError:
        return saved
    return selected.read_adapter(hf_config, saved)


def plain_adapter(saved: PeftAdapter, directory: Path) -> PlainAdapter:
    """Check an adapter that is in memory.

    Args:
        saved: config and tensors.
        directory: where it came from, or a name for it in messages.

    Raises:
        LoraError: as `read_plain_adapter`, but for its files.
    """
    lora = read_lora_config(saved.config)
    raise_if_any(f"{directory} is not an adapter of plain LoRA:", _problems(saved, lora.rank))
    wholes = {hf: saved.tensors[name] for name, hf in whole_weights(saved.tensors).items()}
    pairs = {pair.module: pair for pair in sorted(_pairs(saved.tensors), key=lambda pair: pair.module)}
    return PlainAdapter(directory=directory, lora=lora, pairs=pairs, wholes=wholes, saved=saved)


def _pairs(tensors: Mapping[str, Tensor]) -> Iterator[LoraPair]:
    for module, embedding in _modules(tensors):
        a, b = (tensors[factor_name(module, factor, embedding=embedding)] for factor in "AB")
        if embedding:
            yield LoraPair(module=module, a=b.t(), b=a.t(), embedding=True)
            continue
        parts = unpacked(module, a, b) if is_packed(a) else [(module, a, b)]
        yield from (LoraPair(module=name, a=one, b=other) for name, one, other in parts)


def _modules(tensors: Mapping[str, Tensor]) -> list[tuple[str, bool]]:
    """Each module that has a factor, and whether as an embedding."""
    found = filter(None, map(FACTOR.fullmatch, tensors))
    return sorted({(one["module"], one["embedding"] is not None) for one in found})


def _problems(saved: PeftAdapter, rank: int) -> Iterator[Diagnostic]:
    tensors = saved.tensors
    if not any(FACTOR.fullmatch(name) for name in tensors):
        yield Diagnostic(subject="factors", reason="there are none", cure="export the adapter again")
    wholes = whole_weights(tensors)
    for name, tensor in sorted(tensors.items()):
        found = FACTOR.fullmatch(name)
        if found is None:
            if name not in wholes:
                yield Diagnostic(
                    subject=name,
                    reason="is no factor of a linear or an embedding (base_model.model.MODULE.lora_A.weight or lora_B, "
                    "base_model.model.MODULE.lora_embedding_A or _B)",
                    cure="convert the adapter to plain LoRA without trained biases or whole modules",
                )
            continue
        factor, embedding = found["factor"], found["embedding"] is not None
        partner = factor_name(found["module"], "B" if factor == "A" else "A", embedding=embedding)
        if partner not in tensors:
            yield Diagnostic(subject=name, reason=f"its partner {partner} is missing", cure="export the adapter again")
        yield from _content(name, tensor, rank_dim=-2 if factor == "A" else -1, rank=rank, packable=not embedding)
    for module, embedding in _modules(tensors):
        if problem := other_kind(module, saved.config, embedding=embedding):
            yield problem
    yield from doubled_wholes(tensors)
    yield from _unpackable(tensors)


def _unpackable(tensors: Mapping[str, Tensor]) -> Iterator[Diagnostic]:
    """Packed factors that are no experts', and two pairs for one module or expert."""
    seen: dict[str, str] = {}
    for module, embedding in _modules(tensors):
        a, b = (tensors.get(factor_name(module, factor, embedding=embedding)) for factor in "AB")
        if a is None or b is None:
            continue
        names = [module]
        if not embedding and (is_packed(a) or is_packed(b)):
            problems = list(packed_problems(module, a, b))
            yield from problems
            names = [] if problems else [name for name, _, _ in unpacked(module, a, b)]
        for name in names:
            if name in seen:
                within = f"by itself and within {module if name == seen[name] else seen[name]}"
                yield Diagnostic(
                    subject=name,
                    reason=f"has factors {'of a linear and of an embedding' if module == seen[name] else within}",
                    cure="export the adapter again, packed or expert by expert",
                )
            seen[name] = module


def _content(name: str, tensor: Tensor, *, rank_dim: int, rank: int, packable: bool) -> Iterator[Diagnostic]:
    shape = list(tensor.shape)
    if len(shape) not in ((2, 3) if packable else (2,)) or shape[rank_dim] != rank or 0 in shape:
        expected = f"[{rank}, in]" if rank_dim == -2 else f"[out, {rank}]"
        yield Diagnostic(
            subject=name,
            reason=f"has shape {shape}, the config's r={rank} asks for {expected}"
            + (", after the experts" if len(shape) == 3 else ""),
            cure="export the adapter again; A is [rank, in] and B is [out, rank], each after a number of experts when "
            "it is packed over them",
        )
    elif tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        yield Diagnostic(subject=name, reason=f"has dtype {tensor.dtype}", cure="save it as float32 or bfloat16")
    elif not bool(torch.isfinite(tensor).all()):
        yield Diagnostic(subject=name, reason="holds NaN or infinite values", cure="use an earlier checkpoint")
