"""Packs are invertible, for this model's sizes and for others that hypothesis draws."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lora_plugins_sdk.block_layout import BlockLayout, slabs_of
from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import Site, SiteKind
from lora_plugins_sdk.table import site_layout
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding

TENSOR_PARALLEL = (1, 2, 3, 4)
_EXAMPLES = 60
_LARGEST_FACTOR = 4


def pack_problem(layout: BlockLayout, tp: int) -> str | None:
    """Why a layout is no invertible packing of its projections over `tp` ranks; None when it is one."""
    projections = len(layout.sections)
    if layout.blocks % tp:
        return f"{layout.blocks} blocks cannot be split over {tp} ranks"
    host = layout.host_index()
    if len(host) != layout.host_rows:
        return f"host_index has {len(host)} rows, the host weight {layout.host_rows}"
    held = sorted((projection, row) for projection, row in host if row is not None)
    if held != [(projection, row) for projection in range(projections) for row in range(layout.rows(projection))]:
        return "some HF row has no place in the host weight, or two"
    local = layout.host_rows // tp
    for projection in range(projections):
        for rank in range(tp):
            problem = _share_problem(layout, projection, rank, tp, host[rank * local : (rank + 1) * local])
            if problem:
                return f"rank {rank} of {tp} {problem} of projection {projection}"
    return None


def _share_problem(
    layout: BlockLayout, projection: int, rank: int, tp: int, local: list[tuple[int, int | None]]
) -> str | None:
    """Why the slabs that a rank reads are not, in the layout's own order, what its host rows (`local`) hold."""
    mine = [row for one, row in local if one == projection]
    sections = layout.split(projection, tp)
    rows: list[int | None] = []
    for section, slab in zip(sections, slabs_of(sections, rank), strict=True):
        # Padding comes after the last HF row of a section, and nowhere else.
        rows += [*range(slab.hf, slab.hf + slab.rows), *[None] * (section.local - slab.rows)]
    order = [row for start, count in layout.local_order(projection, tp) for row in range(start, start + count)]
    if sorted(order) != list(range(len(rows))):
        return f"orders {len(rows)} rows as {order}"
    if (found := [rows[row] for row in order]) != mine:
        return f"reads rows {found} and holds rows {mine}"
    spans = layout.spans(projection)
    if sum(count for _, count in spans) * (layout.blocks // tp) != len(rows):
        return f"has spans {spans} in each block for {len(rows)} rows"
    blocks = [local[start : start + layout.block_rows] for start in range(0, len(local), layout.block_rows)]
    seen = [row for block in blocks for start, count in spans for _, row in block[start : start + count]]
    return None if seen == mine else f"finds rows {seen} in its spans and holds rows {mine}"


def _packs(context: Context) -> Iterator[Finding]:
    subject = context.subject
    architecture = subject.selected.architecture
    places = subject.site_modules()
    # A site that this config does not let one adapt resolves, but nothing of it is exercised.
    adapted = {row.host_module for row in subject.table(RunFacts()).rows}
    for site in architecture.sites:
        context.exercised(adapted.intersection(places[site.path]))
        module = next(iter(places[site.path]), site.path)
        try:
            site_layout(site, architecture.dims(subject.hf_config), RunFacts())
        except LoraError as error:
            yield Finding(what="pack", site=module, cause=f"does not resolve: {error}")
            continue
        problem = _search(site, architecture.dims(subject.hf_config))
        if problem:
            yield Finding(what="pack", site=module, cause=problem)


def _search(site: Site, dims: ModelDims) -> str | None:
    """The smallest counterexample that hypothesis finds among multiples of the config's sizes."""
    from hypothesis import HealthCheck, Phase, given, reject, settings
    from hypothesis import strategies as st

    names = sorted(_sizes(site, dims))
    factors = st.fixed_dictionaries({name: st.integers(1, _LARGEST_FACTOR) for name in names})
    failures: list[str] = []

    @settings(
        max_examples=_EXAMPLES,
        database=None,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(factors, st.integers(0, 1), st.sampled_from(TENSOR_PARALLEL if site.kind is SiteKind.COLUMN else (1,)))
    def property_holds(factor: dict[str, int], odd: int, tp: int) -> None:
        config = dict(dims.config) | {name: dims.resolve(name) * factor[name] + odd for name in names}
        try:
            layout = site_layout(site, ModelDims(config, dims.fallbacks), RunFacts(tp=tp))
        except LoraError:
            reject()
        problem = pack_problem(layout, tp)
        if problem:
            failures.append(f"{problem} (TP {tp}, {', '.join(f'{name}={config[name]}' for name in names)})")
        assert not problem

    try:
        property_holds()
    except AssertionError:
        return failures[-1]
    return None


def _sizes(site: Site, dims: ModelDims) -> set[str]:
    """Config keys that the site's widths and its pack read."""
    pack: Any = site.pack
    texts = [text for projection in site.projections for text in (projection.out_dim, *projection.sections)]
    texts += [getattr(pack, name) for name in getattr(pack, "__dataclass_fields__", {})]
    words = {word for text in texts if isinstance(text, str) for word in re.findall(r"[A-Za-z_]\w*", text)}
    return {word for word in words if word in dims.config or word in dims.fallbacks}


CHECKS = (
    Check(
        name="packs",
        level=Level.STATIC,
        proves="Every pack maps HF rows to host rows and back, one to one, for every tensor parallel size.",
        run=_packs,
    ),
)
