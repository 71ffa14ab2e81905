"""The parameter table: what every other part of the SDK reads instead of deriving layouts again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from lora_plugins_sdk.block_layout import BlockLayout, Section
from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.pack import padded_share
from lora_plugins_sdk.region import ExpertRegion, Region, region_of
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import Site, SiteKind, packed_name
from lora_plugins_sdk.targets import Candidate, candidates, pinned_modules

if TYPE_CHECKING:
    from lora_plugins_sdk.manager import SelectedPlugin


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRow:
    """One factor (A or B) of one projection of one layer; of all its experts, where it has them.

    Args:
        hf_module: HF module that the pair adapts, for example `model.layers.0.self_attn.q_proj`; `{expert}` stands for
            a routed expert's number.
        layer: model-wide layer number; None outside the layers.
        factor: `"A"` `[rank, in]` or `"B"` `[out, rank]`; with experts `[experts, rank, in]` and
            `[experts, out, rank]`, or `[1, ...]` for a factor that all of them share.
        host_module: path of the host linear, with the model-wide layer number.
        param: name of the stored parameter under `<host linear>.lora`.
        stacked_at: first row (last dimension but one) within that parameter; A's that share an input are stored
            stacked.
        full_shape: the factor as HF has it.
        local_shape: this factor's part on every rank (host padding included).
        sections: how its rows are split over the ranks; one for an A.
        partition_dim: dimension that TP splits, ETP for experts; -1 when every such rank holds it whole.
        expert_dim: dimension that EP splits; -1 when every such rank holds it whole.
        grad_sum_group: group over which the gradient is summed once per step; None when each rank has it complete.
        expert: whether the factor belongs to routed experts.
        embedding: whether it belongs to an embedding, whose `in` is the vocabulary.
        pinned: whether the run holds the projection at zero; it is then stored apart and trained by nothing.
        packed: whether an adapter file holds the factor of all experts as one tensor, not one tensor each.
        stack: number of HF weights that lie side by side in the host's; 0 where HF has one.
        stack_dim: dimension of the factor along which they lie; -1 for a factor that they share.
        init_key: what the initial values depend on, with the seed and nothing else; with `{expert}`, each expert's.
        hf_name: tensor name in a PEFT adapter file; with `{expert}`, each expert's.
        serving_names: tensor name per engine that serves LoRA there; with `{expert}`, each expert's.
        dtype: storage dtype.
    """

    hf_module: str
    layer: int | None
    factor: str
    host_module: str
    param: str
    stacked_at: int
    full_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    sections: tuple[Section, ...]
    partition_dim: int
    expert_dim: int
    grad_sum_group: str | None
    expert: bool
    embedding: bool
    pinned: bool
    packed: bool
    stack: int
    stack_dim: int
    init_key: str
    hf_name: str
    serving_names: Mapping[str, str] = field(hash=False)
    dtype: str

    @property
    def initially_zero(self) -> bool:
        """Whether this is the factor that makes a fresh pair's product zero: B, and A of an embedding."""
        return (self.factor == "B") != self.embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class SitePlan:
    """One host linear that carries an adapter: its rows and how its output is laid out.

    `layout` and `runs` speak of all projections that the host packs; `rows` of those that are adapted.

    Args:
        site: the declaration.
        layer: model-wide layer number; None outside the layers.
        rows: A and B of each adapted projection, A's first, in host order.
        adapted: index within `site.projections` of each adapted projection.
        layout: resolved pack of the full host weight.
        region: where the branch communicates.
    """

    site: Site
    layer: int | None
    rows: tuple[ParamRow, ...]
    adapted: tuple[int, ...]
    layout: BlockLayout
    region: Region | ExpertRegion

    @property
    def trained(self) -> tuple[int, ...]:
        """Of `adapted`, those that are not pinned."""
        return tuple(index for index, row in zip(self.adapted, self.rows, strict=False) if not row.pinned)

    @property
    def host_module(self) -> str:
        """Path of the host linear, with the model-wide layer number."""
        return self.rows[0].host_module


@dataclass(frozen=True)
class ParameterTable:
    """All plans of one (architecture, HF config, LoRA config, run facts)."""

    architecture: str
    lora: LoraConfig
    facts: RunFacts
    plans: tuple[SitePlan, ...]

    @cached_property
    def rows(self) -> tuple[ParamRow, ...]:
        """Every factor, in plan order."""
        return tuple(row for plan in self.plans for row in plan.rows)

    def to_json(self) -> str:
        """The table as canonical JSON: the same text on every rank that derived the same table."""
        body = {
            "architecture": self.architecture,
            "lora": asdict(self.lora),
            "facts": asdict(self.facts),
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(body, sort_keys=True)

    def logical_digest(self) -> str:
        """SHA-256 of what an adapter's saved tensors mean: architecture, scale, and names, shapes and dtypes of the
        full factors. The same under every topology and seed.
        """
        lora = self.lora
        body = [
            [self.architecture, lora.rank, lora.alpha, lora.use_rslora],
            sorted([row.hf_name, row.full_shape, row.dtype] for row in self.rows),
        ]
        return hashlib.sha256(json.dumps(body).encode()).hexdigest()

    def digest(self) -> str:
        """SHA-256 of the canonical JSON; ranks compare it before step 0."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def derive_table(
    plugin: SelectedPlugin, hf_config: Mapping[str, object], lora: LoraConfig, facts: RunFacts
) -> ParameterTable:
    """Derive the parameter table of one run. Needs no torch and no model.

    Args:
        plugin: the selected plugin; its hooks may override names and gradient sums.
        hf_config: the model's HF `config.json`.
        lora: rank, scale and targets.
        facts: parallel sizes.

    Raises:
        LoraError: targets or pins that do not resolve, a parallel size or a rank that the model's dimensions do not
            allow.
    """
    architecture = plugin.architecture
    dims = architecture.dims(hf_config)
    plugin.validate_run(hf_config, lora, facts)
    wanted = plugin.normalize_targets(hf_config, lora)
    pinned = pinned_modules(architecture, hf_config, lora, wanted)
    plans = []
    for (site, layer), group in groupby(candidates(architecture, hf_config), key=lambda one: (one.site, one.layer)):
        members = list(group)
        adapted = [index for index, one in enumerate(members) if one.hf in wanted]
        if adapted:
            plans.append(_plan(plugin, site, layer, members, adapted, pinned, dims, hf_config, lora, facts))
    if lora.expert_sharing != "none" and not any(plan.site.experts for plan in plans):
        raise LoraError(
            f"expert_sharing={lora.expert_sharing!r}",
            reason="has no effect: the targets name no routed expert",
            cure="add the experts' projections to target_modules, or use expert_sharing='none'",
        )
    table = ParameterTable(architecture=architecture.name, lora=lora, facts=facts, plans=tuple(plans))
    raise_if_any(f"plugin {plugin.name!r} gives one name to several factors:", _shared_names(table))
    return table


def _shared_names(table: ParameterTable) -> list[Diagnostic]:
    users: dict[str, list[str]] = {}
    for row in table.rows:
        users.setdefault(row.hf_name, []).append(row.init_key)
    return [
        Diagnostic(subject=name, reason=f"names {' and '.join(rows)}", cure="fix the plugin's lora_hf_name")
        for name, rows in users.items()
        if len(rows) > 1
    ]


def site_layout(site: Site, dims: ModelDims, facts: RunFacts) -> BlockLayout:
    """Row layout of a site's full host weight.

    Raises:
        LoraError: TP does not divide it, or a projection's sections are not as many rows as it has.
    """
    tp = tensor_parallel_size(site, facts)
    sections = [projection.section_rows(dims) for projection in site.projections]
    if site.kind is SiteKind.COLUMN:
        return site.pack.resolve(dims, sections, tp, facts.make_vocab_size_divisible_by)
    assert len(sections) == 1, "only a COLUMN site packs several projections"
    width = dims.resolve(site.projections[0].in_dim)
    if site.kind is SiteKind.ROW and width % tp and not site.pads_input:
        raise LoraError(
            f"tensor parallel size {tp}",
            reason=f"does not divide the {width} input columns of {site.name}",
            cure=f"use a tensor parallel size that divides {width}",
        )
    return BlockLayout.in_order(blocks=1, shares=sections, sections=sections)


def tensor_parallel_size(site: Site, facts: RunFacts) -> int:
    """Ranks that split one weight of a site: TP, or ETP within an expert."""
    return facts.etp if site.experts else facts.tp


def _plan(
    plugin: SelectedPlugin,
    site: Site,
    layer: int | None,
    members: list[Candidate],
    adapted: list[int],
    pinned: frozenset[str],
    dims: ModelDims,
    hf_config: Mapping[str, object],
    lora: LoraConfig,
    facts: RunFacts,
) -> SitePlan:
    tp = tensor_parallel_size(site, facts)
    layout = site_layout(site, dims, facts)
    region = ExpertRegion(etp=facts.etp, ep=facts.ep) if site.experts else region_of(site.kind, facts)
    experts = dims.resolve(site.experts) if site.experts else None
    rows: list[ParamRow] = []
    for factor in ("A", "B"):
        for index in adapted:
            member = members[index]
            stack = "A_pinned" if member.hf in pinned else "A"
            width, out = dims.resolve(member.projection.in_dim), layout.rows(index)
            raise_if_any(f"cannot adapt {member.hf}:", _rank_too_large(lora.rank, width, out))
            split_rows = factor == "B" and site.kind is SiteKind.COLUMN and tp > 1
            split_columns = factor == "A" and site.kind is SiteKind.ROW and tp > 1
            partition_dim = 0 if split_rows else 1 if split_columns else -1
            full: tuple[int, ...] = (lora.rank, width) if factor == "A" else (out, lora.rank)
            if factor == "A":
                sections: tuple[Section, ...] = (Section(hf=lora.rank, local=lora.rank),)
                multiple = facts.make_vocab_size_divisible_by if site.pads_input else 1
                local: tuple[int, ...] = (lora.rank, padded_share(width, tp if split_columns else 1, multiple))
            else:
                sections = layout.split(index, tp if site.kind is SiteKind.COLUMN else 1)
                local = (sum(section.local for section in sections), lora.rank)
            shared, expert_dim = False, -1
            if experts is not None:
                # The factor on the hidden side may be shared: every expert reads and writes the same residual stream.
                shared = lora.expert_sharing == "outer" and (factor == "A") == (site.kind is SiteKind.COLUMN)
                count = 1 if shared else experts
                expert_dim = 0 if facts.ep > 1 and not shared else -1
                full = (count, *full)
                local = (count // facts.ep if expert_dim == 0 else count, *local)
                partition_dim += 1 if partition_dim >= 0 else 0
            if isinstance(region, ExpertRegion):
                group = region.sum_group(partition_dim, shared)
            else:
                group = region.sum_group(partition_dim)
            stacked = dims.resolve(member.projection.stack) if member.projection.stack else 0
            own = (factor == "B") == (site.kind is SiteKind.COLUMN)
            raise_if_any(f"cannot adapt {member.hf}:", _uneven_stack(stacked, out if factor == "B" else width, own))
            row = ParamRow(
                hf_module=member.hf,
                layer=layer,
                factor=factor,
                host_module=member.host,
                param=stack if factor == "A" else f"B_{member.projection.leaf}",
                stacked_at=lora.rank * sum(one.param == stack for one in rows) if factor == "A" else 0,
                full_shape=full,
                local_shape=local,
                sections=sections,
                partition_dim=partition_dim,
                expert_dim=expert_dim,
                grad_sum_group=group,
                expert=experts is not None,
                embedding=site.embedding,
                pinned=member.hf in pinned,
                packed=experts is not None and lora.expert_sharing == "outer",
                stack=stacked,
                stack_dim=(0 if factor == "B" else 1) if stacked and own else -1,
                init_key=f"{packed_name(member.hf) if shared else member.hf}.lora_{factor}",
                hf_name="",
                serving_names={},
                dtype=lora.dtype,
            )
            rows.append(plugin.complete_row(row, hf_config, facts))
    return SitePlan(site=site, layer=layer, rows=tuple(rows), adapted=tuple(adapted), layout=layout, region=region)


def _uneven_stack(count: int, width: int, own: bool) -> list[Diagnostic]:
    if not own or not count or width % count == 0:
        return []
    return [
        Diagnostic(
            subject=f"a stack of {count} weights",
            reason=f"does not divide their {width} rows or columns side by side",
            cure="use the config.json that belongs to this model type",
        )
    ]


def _rank_too_large(rank: int, width: int, out: int) -> list[Diagnostic]:
    if rank <= min(width, out):
        return []
    return [
        Diagnostic(
            subject=f"rank={rank}",
            reason=f"larger than the smaller side of a [{out}, {width}] weight, where a full-rank update already fits",
            cure=f"use a rank of at most {min(width, out)}",
        )
    ]
