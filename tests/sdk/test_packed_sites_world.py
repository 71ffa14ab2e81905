"""Packs with sections, interleaved gates and scattered runs: the branch and its factors against plain products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from sdk_hybrid import HF_CONFIG, IN_PROJ, LINEAR_QKV, architecture_of
from torch import Tensor, nn

from lora_plugins_sdk import (
    BlockLayout,
    LoraConfig,
    ModelDims,
    SelectedPlugin,
    Site,
    attach,
    export_adapter,
    import_adapter,
    reduce_grads,
)
from lora_plugins_sdk.gather import gather_factors
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import site_layout
from lora_plugins_sdk.testing import Layout, current_run, run_world


@dataclass(frozen=True, kw_only=True, slots=True)
class Scattered:
    """Two blocks a rank, in which the sections of the first projection lie apart, the later one first."""

    def resolve(self, dims: ModelDims, sections: Sequence[Sequence[int]], tp: int, multiple: int = 1) -> BlockLayout:
        blocks = 2 * tp
        shares = [[count // blocks for count in counts] for counts in sections]
        in_order = BlockLayout.in_order(blocks=blocks, shares=shares, sections=sections)
        first, second, third, z, *rest = in_order.runs
        return replace(in_order, runs=(third, z, second, *rest, first))


SCATTERED = replace(
    IN_PROJ,
    pack=Scattered(),
    projections=(
        replace(IN_PROJ.projections[0], out_dim="48", sections=("8", "16", "24")),
        *(replace(one, out_dim="8") for one in IN_PROJ.projections[1:]),
    ),
)
SITES = {"sections": IN_PROJ, "gated-queries": LINEAR_QKV, "scattered": SCATTERED}
TARGETS = {
    "sections": ("in_proj_qkv", "in_proj_a"),
    "gated-queries": ("q_proj", "v_proj"),
    "scattered": ("in_proj_qkv", "in_proj_b"),
}
TOKENS, SAMPLES, WIDTH = 6, 2, 12


class Nothing(nn.Module):
    """A column linear with a zero weight: what comes out, and back, is the branch's alone."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.new_zeros(TOKENS, SAMPLES, len(self.weight)) + 0 * x.sum(), None


def host(site: Site, out: int) -> nn.Module:
    model: Any = nn.Module()
    model.decoder, layer = nn.Module(), nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    layer.self_attention = nn.ModuleDict({site.name: Nothing(out)})
    return model


def plain(site: Site, leaves: dict[str, Tensor], scale: float, x: Tensor) -> Tensor:
    """Every host column of the branch, row by row along `host_index`, by autograd on products in HF order."""
    index = site_layout(site, ModelDims(HF_CONFIG), current_run().facts).host_index()
    outputs = []
    for projection, row in index:
        name = site.projections[projection].hf.format(layer=0)
        if row is None or f"{name}.lora_B" not in leaves:
            outputs.append(x.new_zeros(x.shape[:-1]) + 0 * x.sum(-1))
        else:
            outputs.append(scale * x @ leaves[f"{name}.lora_A"].t() @ leaves[f"{name}.lora_B"][row])
    return torch.stack(outputs, dim=-1)


def step(site: Site, targets: tuple[str, ...]) -> dict[str, float]:
    """Relative difference of everything that the branch computes, after a round trip of the factors."""
    run = current_run()
    tp, rank = run.facts.tp, run.tp_rank
    width = site_layout(site, ModelDims(HF_CONFIG), RunFacts(tp=tp)).host_rows // tp
    model = host(site, width)
    lora = LoraConfig(rank=2, alpha=6, target_modules=targets)
    adapter = attach(model, SelectedPlugin.of(architecture_of(site)), HF_CONFIG, lora, run)

    draw = torch.Generator().manual_seed(3)
    leaves = {row.init_key: torch.randn(row.full_shape, generator=draw) for row in adapter.table.rows}
    saved = {row.hf_name: leaves[row.init_key] for row in adapter.table.rows}
    import_adapter(model, replace(export_adapter(model), tensors=saved))
    exported = export_adapter(model).tensors
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)

    x, upstream = (
        torch.randn(TOKENS, SAMPLES, WIDTH, generator=draw),
        torch.randn(TOKENS, SAMPLES, width * tp, generator=draw),
    )
    for leaf in (x, *leaves.values()):
        leaf.requires_grad_(True)
    expected = plain(site, leaves, lora.scale, x)
    (expected * upstream).sum().backward()

    def of_rank(whole: Tensor) -> Tensor:
        return whole.chunk(tp)[rank] if run.facts.sequence_parallel else whole

    columns = slice(rank * width, (rank + 1) * width)
    mine = of_rank(x).detach().clone().requires_grad_(True)
    output, _ = model.get_submodule(f"decoder.layers.0.self_attention.{site.name}")(mine)
    (output * upstream[..., columns]).sum().backward()
    reduce_grads(model)
    grads = gather_factors(adapter, gradient)
    pairs = {"output": (output, expected[..., columns]), "dX": (gradient(mine), of_rank(gradient(x)))}
    pairs |= {row.init_key: (grads[row], gradient(leaves[row.init_key])) for row in adapter.table.rows}
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("kind", SITES)
def test_branch_and_factors_of_a_packed_site(kind: str, layout: Layout) -> None:
    """B2, B23: sections, output gates and runs that lie apart; all projections of the host, and only some."""
    for targets in (("all-linear",), TARGETS[kind]):
        for errors in run_world(step, layout, SITES[kind], targets):
            assert len(errors) == 2 + 2 * (len(SITES[kind].projections) if targets == ("all-linear",) else 2)
            assert max(errors.values()) < 2e-6, errors
