"""Adapters on weights that are no linear of their own in HF, in PEFT's form for such (`target_parameters`), and back.

An adapter file names the factors of each expert. transformers' model has no such modules: it holds the weights of all
experts in one parameter `[experts, out, in]`, and PEFT gives the whole parameter one A `[experts * r, in]`, expert by
expert, and one B `[out, r * experts]`, in which the experts of one rank are neighbours. Projections that share the
parameter (gate and up) become one of the sum of their ranks, its B block-diagonal. The delta is the same. A stack of
weights (`lora_plugins_sdk.stacks`) is such a parameter too. A router is no linear either: its factors keep their names
and shapes, and the config names the parameter. So do those of a linear whose name PEFT takes for the experts'
(`Projection.name_taken`), and of one with padding rows, whose B has them zero. An embedding whose module does more than
look up (`Projection.by_weight`) has its factors transposed and exchanged, as its weight is `[vocabulary, hidden]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.architecture import Architecture
from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_files import PeftAdapter
from lora_plugins_sdk.peft_names import PEFT_PREFIX, factor_name
from lora_plugins_sdk.site import EXPERT, Projection, SiteKind, packed_name
from lora_plugins_sdk.targets import Candidate, candidates


@dataclass(frozen=True, kw_only=True, slots=True)
class HfParameter:
    """One HF parameter whose factors PEFT cannot take as an adapter file has them.

    Args:
        name: of the parameter, for example `model.layers.0.mlp.experts.gate_up_proj`.
        projections: HF modules (with `{expert}` where there are experts) that it packs along `out`, in order.
        widths: rows of each.
        experts: number of experts, or of the weights of a stack; 1 where the parameter is a plain matrix.
        padding: rows after those of the projections, to which no adapter adds anything.
        stack_shared: of a stack, the factor that its weights share, "A" or "B"; "" for everything else.
        embedding: whether the parameter is an embedding's, `[in, out]`; `widths` is then the vocabulary.
    """

    name: str
    projections: tuple[str, ...]
    widths: tuple[int, ...]
    experts: int
    padding: int = 0
    stack_shared: str = ""
    embedding: bool = False

    @property
    def module(self) -> str:
        """The module that has the parameter."""
        return self.name.rsplit(".", 1)[0]


def hf_parameters(architecture: Architecture, hf_config: Mapping[str, object]) -> list[HfParameter]:
    """The parameters of a model that PEFT must target as such, layer by layer; empty when all are linears' weights.

    Raises:
        LoraError: the config is another model's.
    """
    dims = architecture.dims(hf_config)
    found: dict[str, list[Candidate]] = {}
    for one in candidates(architecture, hf_config):
        if one.site.fused_hf is not None:
            found.setdefault(one.site.fused_hf.format(layer=one.layer), []).append(one)
        elif one.projection.stack is not None:
            found[one.hf] = [one]
        elif one.site.method != "forward" or _by_weight(one.projection) or _padding(one, dims):
            found[f"{one.hf}.weight"] = [one]
    return [_parameter(name, members, dims) for name, members in found.items()]


def _by_weight(projection: Projection) -> bool:
    return projection.by_weight or projection.name_taken


def _parameter(name: str, members: Sequence[Candidate], dims: ModelDims) -> HfParameter:
    first = members[0]
    count = dims.resolve(first.site.experts or first.projection.stack or "1")
    column = first.site.kind is SiteKind.COLUMN
    # The host has the weights of a stack side by side: along the output of a column site.
    beside = count if first.projection.stack is not None and column else 1
    return HfParameter(
        name=name,
        projections=tuple(one.hf for one in members),
        widths=tuple(
            dims.resolve(one.projection.in_dim if one.site.embedding else one.projection.out_dim) // beside
            for one in members
        ),
        experts=count,
        padding=_padding(first, dims),
        stack_shared=("A" if column else "B") if first.projection.stack is not None else "",
        embedding=first.site.embedding,
    )


def _padding(one: Candidate, dims: ModelDims) -> int:
    padded = one.projection.padded_to
    return dims.resolve(padded) - dims.resolve(one.projection.out_dim) if padded is not None else 0


def to_parameters(adapter: PeftAdapter, parameters: Sequence[HfParameter]) -> PeftAdapter:
    """An adapter with factors per expert (or packed, `[experts, ...]`) as PEFT loads it on transformers' model.

    Everything else stays; the config then names every module and parameter in full, and has no dropout, which PEFT
    cannot apply to parameters.

    Args:
        adapter: as `export_adapter` makes it.
        parameters: of the model, by `hf_parameters`.

    Raises:
        LoraError: a projection has factors for some of its experts only.
    """
    tensors = dict(adapter.tensors)
    adapted = {one: [module for module in one.projections if _names(tensors, one, module, "A")] for one in parameters}
    adapted = {one: modules for one, modules in adapted.items() if modules}
    if not adapted:
        return adapter
    fused: dict[str, Tensor] = {}
    for parameter, prefix in _placed(adapted):
        pairs = [_take_pair(tensors, parameter, module) for module in adapted[parameter]]
        shape = pairs[0][0].shape
        held = dict(zip(adapted[parameter], (b for _, b in pairs), strict=True))
        blocks = [
            held.get(module, pairs[0][1].new_zeros(parameter.experts, width, 0))
            for module, width in zip(parameter.projections, parameter.widths, strict=True)
        ]
        blocks.append(pairs[0][1].new_zeros(parameter.experts, parameter.padding, 0))
        whole = torch.stack([torch.block_diag(*one) for one in zip(*blocks, strict=True)])
        fused[f"{prefix}.lora_A.weight"] = torch.cat([a for a, _ in pairs], dim=1).reshape(-1, shape[-1])
        fused[f"{prefix}.lora_B.weight"] = whole.permute(1, 2, 0).flatten(1)
    config = dict(adapter.config) | {
        "target_modules": sorted({_module(name) for name in tensors}),
        "target_parameters": [one.name for one in adapted],
        "lora_dropout": 0.0,
        **_patterns(adapter.config, {one.name: len(modules) for one, modules in adapted.items()}),
    }
    return replace(adapter, tensors=tensors | fused, config=config)


def from_parameters(adapter: PeftAdapter, parameters: Sequence[HfParameter]) -> PeftAdapter:
    """The inverse of `to_parameters`: factors of each expert, from an adapter on the parameters that hold them.

    Raises:
        LoraError: a parameter's factors have another shape than `to_parameters` gives them, or its projections share a
            factor, so that no pair per projection has the same rank.
    """
    wanted = set(adapter.config.get("target_parameters") or ())
    adapted = [one for one in parameters if one.name in wanted]
    if not adapted:
        return adapter
    tensors, rank = dict(adapter.tensors), int(adapter.config["r"])
    for parameter, prefix in _placed(adapted):
        a, b = (tensors.pop(f"{prefix}.lora_{factor}.weight") for factor in "AB")
        count, experts = len(parameter.projections), parameter.experts
        heights = [*parameter.widths, parameter.padding]
        if a.shape[0] != count * rank * experts or tuple(b.shape) != (sum(heights), a.shape[0]):
            raise LoraError(
                parameter.name,
                reason=f"its factors have shapes {list(a.shape)} and {list(b.shape)}, where {count} projections of "
                f"rank {rank} and {experts} experts are expected",
                cure="give an adapter that trains all projections of the parameter with one rank each",
            )
        by_expert = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
        *blocks, padding = by_expert.split(heights, dim=1)
        if padding.count_nonzero():
            raise LoraError(
                parameter.name,
                reason=f"the last {parameter.padding} rows of its B are padding and not zero",
                cure="give an adapter that was trained on this base",
            )
        for index, (module, rows) in enumerate(zip(parameter.projections, blocks, strict=True)):
            ranks = slice(index * rank, (index + 1) * rank)
            if rows.count_nonzero() != rows[:, :, ranks].count_nonzero():
                raise LoraError(
                    parameter.name,
                    reason="the rows of one projection use the ranks of another",
                    cure="train each projection with factors of its own",
                )
            tensors |= _as_saved(parameter, module, a.view(experts, -1, a.shape[1])[:, ranks], rows[:, :, ranks])
    config = {key: value for key, value in adapter.config.items() if key not in _OF_PARAMETERS}
    config["target_modules"] = sorted({_module(name) for name in tensors})
    return replace(adapter, tensors=tensors, config=config)


def _as_saved(parameter: HfParameter, module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The factors `[experts, r, in]` and `[experts, out, r]` of a projection by the names that an adapter file has."""
    if parameter.embedding:
        return {
            factor_name(module, factor, embedding=True): tensor[0].t().contiguous()
            for factor, tensor in (("A", b), ("B", a))
        }
    pair, named = {"A": a, "B": b}, factor_name(module, "{}")
    if not parameter.stack_shared:
        return {
            named.replace(EXPERT, str(expert)).format(factor): tensor[expert].contiguous()
            for expert in range(parameter.experts)
            for factor, tensor in pair.items()
        }
    shared = pair[parameter.stack_shared]
    if not torch.equal(shared, shared[:1].expand_as(shared)):
        raise LoraError(
            parameter.name,
            reason=f"each of its {parameter.experts} weights has a factor {parameter.stack_shared} of its own",
            cure="give an adapter in which they share it",
        )
    pair[parameter.stack_shared] = shared[:1]
    return {named.format(factor): tensor.contiguous() for factor, tensor in pair.items()}


_OF_PARAMETERS = ("target_parameters", "rank_pattern", "alpha_pattern")


def _placed(parameters: Iterable[HfParameter]) -> Iterator[tuple[HfParameter, str]]:
    """Where PEFT keeps the factors of each: it wraps a module once per parameter, the first innermost."""
    inner: dict[str, list[HfParameter]] = {}
    for one in parameters:
        inner.setdefault(one.module, []).append(one)
    for module, ones in inner.items():
        for depth, one in enumerate(reversed(ones)):
            yield one, f"{PEFT_PREFIX}{module}{'.base_layer' * depth}"


def _names(tensors: Mapping[str, Tensor], parameter: HfParameter, module: str, factor: str) -> list[str]:
    """Names of one factor of a projection's experts, packed or not, that are there."""
    packed = factor_name(packed_name(module), factor, embedding=parameter.embedding)
    if packed in tensors:
        return [packed]
    each = re.compile(re.escape(factor_name(module, factor)).replace(re.escape(EXPERT), r"(\d+)"))
    found = {int(match[1]): name for name in tensors if (match := each.fullmatch(name))}
    return [found[number] for number in sorted(found)]


def _take_pair(tensors: dict[str, Tensor], parameter: HfParameter, module: str) -> tuple[Tensor, Tensor]:
    """A `[experts, r, in]` and B `[experts, out, r]` of one projection, taken out of `tensors`; those of an embedding's
    weight, whose rows are the vocabulary.
    """
    experts, pair = parameter.experts, []
    for factor in "AB":
        names = _names(tensors, parameter, module, factor)
        parts = [tensors.pop(name) for name in names]
        whole = parts[0] if parts and parts[0].dim() == 3 else torch.stack(parts) if parts else torch.empty(0)
        if whole.shape[0] not in ((1, experts) if whole.dim() == 3 and len(parts) == 1 else (experts,)):
            raise LoraError(
                module,
                reason=f"its {factor} factors are those of {whole.shape[0]} of {experts} experts",
                cure="export the adapter again",
            )
        pair.append(whole.expand(experts, *whole.shape[1:]))
    return (pair[1].mT, pair[0].mT) if parameter.embedding else (pair[0], pair[1])


def _module(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).rsplit(".lora_", 1)[0]


def _patterns(config: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """PEFT's rank and alpha of each parameter: both grow with the ranks that it has side by side, the scale stays."""
    root = bool(config.get("use_rslora"))
    return {
        "rank_pattern": {re.escape(name): count * config["r"] for name, count in ranks.items()},
        "alpha_pattern": {
            re.escape(name): config["lora_alpha"] * (math.sqrt(count) if root else count)
            for name, count in ranks.items()
        },
    }
