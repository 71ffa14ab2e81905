"""From what a user asks for (`all-linear`, `q_proj`, `linear_qkv`, paths, wildcards) to the projections that exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lora_plugins_sdk.architecture import Architecture
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.layers import layers_with, number_of_layers
from lora_plugins_sdk.site import EXPERT, Projection, Site, packed_name

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One projection of one layer, with every name it answers to."""

    site: Site
    projection: Projection
    layer: int | None

    @property
    def hf(self) -> str:
        """Full HF module name, for example `model.layers.3.self_attn.q_proj`; `{expert}` stands for all experts."""
        return self.projection.hf.format(layer=self.layer, expert=EXPERT)

    @property
    def host(self) -> str:
        """Full host module path, with the model-wide layer number."""
        return self.site.path.format(layer=self.layer)

    def matches(self, target: str) -> bool:
        """Whether a target names this projection: a path suffix, or a wildcard over the full HF or host path.

        Experts are named together, with or without `{expert}`.
        """
        if target == ALL_LINEAR:
            return self.site.all_linear
        paths = (self.hf, packed_name(self.hf), self.host)
        if any(sign in target for sign in "*?["):
            return any(fnmatchcase(path, target) for path in paths)
        return any(path == target or path.endswith(f".{target}") for path in paths)


def candidates(architecture: Architecture, hf_config: Mapping[str, object]) -> list[Candidate]:
    """Every projection that the model has, under the names of its own checkpoint: the embedding, site by site within
    each layer, then what else exists once.

    Raises:
        LoraError: the config is another model's, its number of layers is none, or it does not say of which type they
            are.
    """
    dims = architecture.dims(hf_config)
    count = number_of_layers(dims, architecture.num_layers)
    sites = architecture.of_config(hf_config).sites
    layers = [layers_with(site.path, site.layers, dims, count) for site in sites]
    places = [(site, None) for site in sites if site.embedding] + [
        (site, layer)
        for layer in (*range(count), None)
        for site, present in zip(sites, map(set, layers), strict=True)
        if layer in present and not site.embedding
    ]
    return [
        Candidate(site=site, projection=projection, layer=layer)
        for site, layer in places
        for projection in site.projections
    ]


def module_names(architecture: Architecture, hf_config: Mapping[str, object]) -> list[str]:
    """HF names of all projections; those of routed experts without a number, as for all experts together.

    Raises:
        LoraError: as `candidates`.
    """
    return [packed_name(one.hf) for one in candidates(architecture, hf_config)]


def normalize_targets(architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig) -> frozenset[str]:
    """Full HF names of the projections to adapt.

    Raises:
        LoraError: a target or an exclusion that matches nothing, a target the model refuses, or nothing left to train.
    """
    known = candidates(architecture, hf_config)
    raise_if_any("cannot resolve the LoRA targets:", _unmatched(known, lora))
    flags = architecture.dims(hf_config)
    picked: set[str] = set()
    refused: list[Diagnostic] = []
    for one in known:
        hits = [target for target in lora.target_modules if one.matches(target)]
        if not hits or any(one.matches(target) for target in lora.exclude_modules):
            continue
        if lora.scope not in ("all", one.site.region):
            continue
        if one.site.tied is not None and flags.flag(one.site.tied.when):
            refused.append(
                Diagnostic(
                    subject=f"target {hits[0]!r} ({one.hf})",
                    reason=f"the config sets {one.site.tied.when}: the weight is {one.site.tied.to} itself, "
                    "and an adapter on one of its users would not reach the other",
                    cure=f"drop {one.projection.leaf} from the targets, or use a base whose weight is its own",
                )
            )
            continue
        picked.add(one.hf)
    raise_if_any("cannot adapt the LoRA targets:", refused)
    if not picked:
        raise LoraError(
            f"targets {', '.join(lora.target_modules)}",
            reason=f"nothing is left to train after exclusions and scope {lora.scope!r}",
            cure="widen target_modules, exclude less, or use scope 'all'",
        )
    return frozenset(picked)


def pinned_modules(
    architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig, wanted: Collection[str]
) -> frozenset[str]:
    """Full HF names of the projections that are held at zero.

    Args:
        architecture: the model's.
        hf_config: its config.
        lora: names the targets and the pins.
        wanted: what the targets resolve to.

    Raises:
        LoraError: a pin that names no target, or pins that leave nothing to train.
    """
    adapted = [one for one in candidates(architecture, hf_config) if one.hf in wanted]
    idle = [pin for pin in lora.pinned_modules if not any(one.matches(pin) for one in adapted)]
    raise_if_any(
        "cannot pin:",
        [
            Diagnostic(
                subject=f"pin {pin!r}",
                reason="matches no projection that the targets name, so it has no effect",
                cure="correct it or leave it out",
            )
            for pin in idle
        ],
    )
    pinned = frozenset(one.hf for one in adapted if any(one.matches(pin) for pin in lora.pinned_modules))
    if pinned and len(pinned) == len(set(wanted)):
        raise LoraError(
            f"pins {', '.join(lora.pinned_modules)}",
            reason="hold every target at zero: nothing is left to train",
            cure="widen target_modules, or pin less",
        )
    return pinned


def _unmatched(known: list[Candidate], lora: LoraConfig) -> Iterable[Diagnostic]:
    names = sorted({one.projection.leaf for one in known} | {one.site.name for one in known})
    for option, targets in (("target", lora.target_modules), ("exclusion", lora.exclude_modules)):
        for target in targets:
            if any(one.matches(target) for one in known):
                continue
            close = difflib.get_close_matches(target, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            yield Diagnostic(
                subject=f"{option} {target!r}",
                reason="matches no projection of this model",
                cure=f"{hint}known names: {ALL_LINEAR}, {', '.join(names)}; wildcards match full paths",
            )
