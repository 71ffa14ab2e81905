"""Projections that a run holds at zero: in every file, trained by nothing, and never silently emptied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sdk_hybrid import HF_CONFIG, IN_PROJ, architecture_of
from sdk_toy import HF_CONFIG as TOY_CONFIG
from sdk_toy_host import randomize, toy_inputs, toy_model, toy_plugin
from test_packed_sites_world import SAMPLES, TOKENS, WIDTH, gradient, host
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    ModelDims,
    RunFacts,
    SelectedPlugin,
    adapter_of,
    attach,
    derive_table,
    export_adapter,
    gather_adam_moments,
    import_adapter,
    load_adam_moments,
    reduce_grads,
)
from lora_plugins_sdk.cli.table_rows import table_rows
from lora_plugins_sdk.table import site_layout
from lora_plugins_sdk.testing import Layout, current_run, run_world

STEPS = 20
SERVED, UNSERVED = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")
PLUGIN = SelectedPlugin.of(architecture_of(IN_PROJ))
PEFT = "base_model.model.model.layers.0.linear_attn"


def train(lora: LoraConfig, recompute: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, int]:
    """Some steps of AdamW with weight decay: the adapter before and after, the last output of this rank, and how many
    numbers were trained.
    """
    run = current_run()
    tp = run.facts.tp
    width = site_layout(IN_PROJ, ModelDims(HF_CONFIG), RunFacts(tp=tp)).host_rows // tp
    model = host(IN_PROJ, width)
    adapter = attach(model, PLUGIN, HF_CONFIG, lora, run)
    before = {name: tensor.clone() for name, tensor in export_adapter(model).tensors.items()}
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.05, weight_decay=0.1)
    linear: Any = model.get_submodule("decoder.layers.0.self_attention.in_proj")
    draw = torch.Generator().manual_seed(5)
    output = torch.empty(0)
    for _ in range(STEPS):
        x = torch.randn(TOKENS, SAMPLES, WIDTH, generator=draw)
        upstream = torch.randn(TOKENS, SAMPLES, width * tp, generator=draw)
        mine = (x.chunk(tp)[run.tp_rank] if run.facts.sequence_parallel else x).requires_grad_(True)
        output = checkpoint(lambda x: linear(x)[0], mine, use_reentrant=False) if recompute else linear(mine)[0]
        assert isinstance(output, Tensor)
        optimizer.zero_grad()
        (output * upstream[..., run.tp_rank * width : (run.tp_rank + 1) * width]).mean().backward()
        reduce_grads(model)
        optimizer.step()
    trained = sum(parameter.numel() for parameter in adapter.parameters())
    return before, dict(export_adapter(model).tensors), output.detach(), trained


@pytest.mark.world
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [(Layout(), False), (Layout(tp=2), True), (Layout(tp=2, sequence_parallel=True), False)],
    ids=["single", "tp2-recompute", "tp2+sp"],
)
def test_pinned_rows_stay_exactly_zero(layout: Layout, recompute: bool) -> None:
    """B26: after 20 steps with weight decay, as if nothing but the served projections were adapted."""
    everything = LoraConfig(rank=2, alpha=4, target_modules=(*SERVED, *UNSERVED))
    pinned = run_world(train, layout, replace(everything, pinned_modules=UNSERVED), recompute)
    alone = run_world(train, layout, replace(everything, target_modules=SERVED), recompute)
    free = run_world(train, layout, everything, recompute)
    for rank, ((before, after, output, count), (_, expected, output_alone, count_alone)) in enumerate(
        zip(pinned, alone, strict=True)
    ):
        assert before.keys() == after.keys() and len(after) == 8 and len(expected) == 4
        for name, tensor in expected.items():
            assert torch.equal(after[name], tensor) and not torch.equal(tensor, before[name]), name
        for leaf in UNSERVED:
            assert torch.count_nonzero(after[f"{PEFT}.{leaf}.lora_B.weight"]) == 0
            # A is as it was drawn, so that a run without the pin can go on from this file.
            assert torch.equal(after[f"{PEFT}.{leaf}.lora_A.weight"], before[f"{PEFT}.{leaf}.lora_A.weight"])
            assert torch.count_nonzero(free[rank][1][f"{PEFT}.{leaf}.lora_B.weight"]) > 0
        columns = 8 // layout.tp  # b and a are the last rows of a rank
        assert torch.count_nonzero(output[..., -columns:]) == 0 and torch.equal(output, output_alone)
        assert torch.count_nonzero(free[rank][2][..., -columns:]) > 0
        assert count == count_alone < free[rank][3]


def pinned_toy(pins: tuple[str, ...]) -> Any:
    model = toy_model()
    attach(model, toy_plugin(), TOY_CONFIG, LoraConfig(rank=2, alpha=4, pinned_modules=pins))
    return model


def test_a_site_that_is_pinned_as_a_whole() -> None:
    """What is left is the model without that adapter: same output, same gradients."""
    model, other = pinned_toy(("o_proj", "k_proj")), toy_model()
    attach(other, toy_plugin(), TOY_CONFIG, LoraConfig(rank=2, alpha=4, exclude_modules=("o_proj", "k_proj")))
    outputs = []
    for one in (model, other):
        randomize(one)
        outputs.append(one(*toy_inputs()))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    mine, theirs = (dict(adapter_of(one).named_parameters()) for one in (model, other))
    assert mine.keys() == theirs.keys() and all(
        torch.equal(gradient(mine[name]), gradient(theirs[name])) for name in mine
    )


def test_a_file_of_a_pinned_run_starts_a_free_one_and_the_reverse() -> None:
    """The files are of one form; only a delta that the run could not keep is refused, before anything is written."""
    model, free = pinned_toy(("o_proj",)), pinned_toy(())
    randomize(model)
    saved = export_adapter(model)
    import_adapter(free, saved)
    assert all(map(torch.equal, export_adapter(free).tensors.values(), saved.tensors.values()))
    import_adapter(model, export_adapter(free))
    assert torch.equal(model(*toy_inputs()), free(*toy_inputs()))

    randomize(free, seed=2)
    before = {name: tensor.clone() for name, tensor in export_adapter(model).tensors.items()}
    with pytest.raises(LoraError, match="holds at zero") as error:
        import_adapter(model, export_adapter(free))
    assert [one.subject for one in error.value.diagnostics] == [
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_B.weight" for layer in range(2)
    ]
    assert all(map(torch.equal, export_adapter(model).tensors.values(), before.values()))


def test_moments_of_a_pinned_run() -> None:
    """B15: saved as zeros where the run pins, put back by a run with or without the pin; what a pin would drop is
    refused.
    """

    def stepped(pins: tuple[str, ...]) -> tuple[Any, torch.optim.AdamW]:
        model = pinned_toy(pins)
        optimizer = torch.optim.AdamW(adapter_of(model).parameters(), lr=0.01)
        model(*toy_inputs()).square().mean().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped(("o_proj",))
    moments = gather_adam_moments(adapter_of(model), optimizer)
    zero = {name for name, tensor in moments.items() if not tensor.any()}
    assert {name for name in moments if ".o_proj." in name} <= zero
    # B is zero at first, so A has no gradient yet; every other B has one.
    assert {name for name in moments if ".o_proj." not in name and "lora_B" in name}.isdisjoint(zero)

    for pins in (("o_proj",), ()):
        other = pinned_toy(pins)
        fresh = torch.optim.AdamW(adapter_of(other).parameters())
        load_adam_moments(adapter_of(other), fresh, moments, step=1)
        again = gather_adam_moments(adapter_of(other), fresh)
        assert again.keys() == moments.keys() and all(torch.equal(again[name], moments[name]) for name in moments)

    free, its_optimizer = stepped(())
    learned = gather_adam_moments(adapter_of(free), its_optimizer)
    before = gather_adam_moments(adapter_of(model), optimizer)
    with pytest.raises(LoraError, match="holds at zero") as error:
        load_adam_moments(adapter_of(model), optimizer, learned, step=1)
    assert all(".o_proj.lora_B." in one.subject for one in error.value.diagnostics)
    assert len(error.value.diagnostics) == 4  # two layers, two moments
    after = gather_adam_moments(adapter_of(model), optimizer)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_pins_that_have_no_effect_or_leave_nothing() -> None:
    def table(**options: Any) -> Any:
        return derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=2, **options), RunFacts())

    with pytest.raises(LoraError, match=r"pin 'in_proj_c': matches no projection that the targets name"):
        table(pinned_modules=("in_proj_c",))
    with pytest.raises(LoraError, match=r"pin 'in_proj_b': matches no projection that the targets name"):
        table(pinned_modules=("in_proj_b",), exclude_modules=("in_proj_b",))
    with pytest.raises(LoraError, match=r"nothing is left to train"):
        table(pinned_modules=("all-linear",))
    with pytest.raises(LoraError, match=r"pinned_modules: 3: not a module name"):
        LoraConfig(pinned_modules=(3,))  # type: ignore[arg-type]


def test_the_table_tells_pinned_rows_and_saved_tensors_mean_the_same() -> None:
    free, pinned = (
        derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=2, pinned_modules=pins), RunFacts()) for pins in ((), UNSERVED)
    )
    assert free.logical_digest() == pinned.logical_digest() and free.digest() != pinned.digest()
    assert [row.hf_module.rsplit("_", 1)[-1] for row in pinned.rows if row.pinned] == ["b", "a", "b", "a"]
    assert [cells[5] for cells in table_rows(pinned)] == ["-", "-", "pinned", "pinned"] * 2
