"""What an adapter directory holds, and what it would change in a given base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins_sdk.dims import ModelDims, read_hf_config
from lora_plugins_sdk.errors import Diagnostic, LoraError
from lora_plugins_sdk.offline.adapter import PlainAdapter
from lora_plugins_sdk.offline.fit import fit, kind_of
from lora_plugins_sdk.offline.origin import origin_problems
from lora_plugins_sdk.offline.products import product_norm
from lora_plugins_sdk.selection import load_plugin
from lora_plugins_sdk.site import EXPERT
from lora_plugins_sdk.targets import Candidate, candidates
from lora_plugins_sdk.weight_files import read_weight_files


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFacts:
    """One factor pair.

    Args:
        module: HF module.
        out: output width; rows of B.
        width: input width, the vocabulary of an embedding; columns of A.
        norm_a: Frobenius norm of A.
        norm_b: of B.
        norm_delta: of `scale * B A`.
    """

    module: str
    out: int
    width: int
    norm_a: float
    norm_b: float
    norm_delta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How much of one kind of module (`model.layers.*.mlp.up_proj`) is adapted: `adapted` of `total` in the model."""

    kind: str
    adapted: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFacts:
    """An adapter against a base.

    Args:
        model_type: of the base's config.
        plugin: the installed plugin that serves it; None when there is none.
        coverage: each kind of module that the adapter or the plugin knows; none for an export for an engine.
        problems: what does not fit.
    """

    model_type: str
    plugin: str | None
    coverage: tuple[Coverage, ...]
    problems: tuple[Diagnostic, ...]


def pair_facts(adapter: PlainAdapter) -> list[PairFacts]:
    """Shapes and norms of every pair, in the order of their modules."""
    found = []
    for pair in adapter.pairs.values():
        a, b = (pair.b.t(), pair.a.t()) if pair.embedding else (pair.a, pair.b)
        found.append(
            PairFacts(
                module=pair.module,
                out=b.shape[0],
                width=a.shape[1],
                norm_a=float(a.double().norm()),
                norm_b=float(b.double().norm()),
                norm_delta=adapter.lora.scale * product_norm(pair),
            )
        )
    return found


def base_facts(adapter: PlainAdapter, base: str | Path) -> BaseFacts:
    """What the adapter would change in a base.

    Raises:
        LoraError: the base itself cannot be read. What does not fit is in `problems`.
    """
    config = read_hf_config(base)
    weights = read_weight_files(base)
    problems = list(origin_problems(adapter, Path(base)))
    plugin, known = _plugin_modules(config)
    if adapter.saved.origin is not None and adapter.saved.origin.engine is not None:
        # Its names are the engine's: none of them says anything of the base's modules.
        return BaseFacts(model_type=str(config.get("model_type")), plugin=plugin, coverage=(), problems=tuple(problems))
    problems += fit(adapter, weights, config).problems
    if plugin is None:
        kinds = {kind_of(module) for module in adapter.pairs}
        modules = (name.removesuffix(".weight") for name in weights.where if name.endswith(".weight"))
        known = [module for module in modules if kind_of(module) in kinds]
    else:
        problems += [
            Diagnostic(
                subject=module,
                reason=f"plugin {plugin!r} adapts no such module, so it cannot be trained further here",
                cure="merge it, or serve it with an engine that can",
            )
            for module in sorted(adapter.pairs.keys() - set(known))
        ]
    return BaseFacts(
        model_type=str(config.get("model_type")),
        plugin=plugin,
        coverage=tuple(_coverage(known, adapter.pairs)),
        problems=tuple(problems),
    )


def _plugin_modules(config: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    try:
        plugin = load_plugin(str(config.get("model_type")))
        dims = plugin.architecture.dims(config)
        return plugin.name, [name for one in candidates(plugin.architecture, config) for name in _names(one, dims)]
    except LoraError:
        # No plugin, or a config that it cannot read: the base's own tensors then say what there is.
        return None, []


def _names(one: Candidate, dims: ModelDims) -> Iterator[str]:
    """A projection as the pairs of a `PlainAdapter` name it: each expert, and each weight of a stack, by itself."""
    stem, _, leaf = one.hf.rpartition(".")
    if one.site.experts is not None:
        yield from (one.hf.replace(EXPERT, str(number)) for number in range(dims.resolve(one.site.experts)))
    elif one.projection.stack is not None:
        yield from (f"{stem}.{number}.{leaf}" for number in range(dims.resolve(one.projection.stack)))
    else:
        yield one.hf


def _coverage(known: Iterable[str], adapted: Iterable[str]) -> list[Coverage]:
    have = Counter(map(kind_of, adapted))
    total = Counter(map(kind_of, {*known, *adapted}))
    return [Coverage(kind=kind, adapted=have[kind], total=total[kind]) for kind in sorted(total)]
