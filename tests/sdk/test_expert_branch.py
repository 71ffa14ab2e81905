"""The branch of routed experts against a model whose weights hold the delta already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdk_experts_host import HF_CONFIG, MoeModel, moe_model, moe_plugin, moe_tokens
from sdk_toy_host import assert_same, randomize, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_plugins_sdk import (
    FrozenAdapter,
    LoraConfig,
    LoraError,
    ParallelRun,
    RunFacts,
    adapter_of,
    attach,
    detach,
    disable_adapters,
    export_adapter,
)

PREFIX = "base_model.model.model.layers"


def adapted(lora: LoraConfig, dtype: torch.dtype = torch.float64) -> MoeModel:
    model = moe_model(dtype=dtype)
    attach(model, moe_plugin(), HF_CONFIG, lora)
    randomize(model)
    return model


def one_expert(factors: dict[str, Tensor], layer: int, expert: int, leaf: str, factor: str) -> Tensor:
    """One expert's factor by its name in an adapter file, whichever of the two forms the file has."""
    own = factors.get(f"{PREFIX}.{layer}.mlp.experts.{expert}.{leaf}.lora_{factor}.weight")
    if own is not None:
        return own
    packed = factors[f"{PREFIX}.{layer}.mlp.experts.{leaf}.lora_{factor}.weight"]
    return packed[0] if packed.shape[0] == 1 else packed[expert]


def folded_weights(factors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The base's grouped weights with every delta added."""

    def delta(layer: int, expert: int, leaf: str) -> Tensor:
        a, b = (one_expert(factors, layer, expert, leaf, factor) for factor in "AB")
        return scale * b @ a

    base, weights = moe_model(dtype=torch.float64), {}
    for layer in range(2):
        for expert in range(4):
            for name, leaves in (("linear_fc1", ("gate_proj", "up_proj")), ("linear_fc2", ("down_proj",))):
                path = f"decoder.layers.{layer}.mlp.experts.{name}.weight{expert}"
                weights[path] = base.get_parameter(path) + torch.cat([delta(layer, expert, leaf) for leaf in leaves])
    return weights


@pytest.mark.parametrize("sharing", ["none", "outer"])
def test_output_and_gradients_equal_the_folded_model(sharing: str) -> None:
    lora = LoraConfig(rank=3, alpha=5.0, expert_sharing=sharing)
    model = adapted(lora)
    x, weight = moe_tokens(dtype=torch.float64)
    tensors = {name: one.double().requires_grad_() for name, one in export_adapter(model).tensors.items()}
    at_model, at_folded = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual = model(at_model)
    (actual * weight).sum().backward()
    expected = torch.func.functional_call(moe_model(dtype=torch.float64), folded_weights(tensors, 5 / 3), (at_folded,))
    (expected * weight).sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(at_model.grad, at_folded.grad)
    adapter = adapter_of(model)
    for factors in adapter.factors():
        for row in factors.plan.rows:
            grads = adapter.plugin.export_tensor(row, factors.local(row, lambda one: one.grad))  # type: ignore[arg-type,return-value]
            for name, grad in grads.items():
                reference = tensors[name].grad
                reference = torch.zeros_like(grad) if reference is None else reference.float()
                torch.testing.assert_close(grad, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharing", ["none", "outer"])
def test_a_fresh_adapter_changes_nothing_and_detach_restores_everything(sharing: str) -> None:
    model = moe_model()
    before, expected = snapshot(model), model(moe_tokens()[0])
    attach(model, moe_plugin(), HF_CONFIG, LoraConfig(rank=4, expert_sharing=sharing))
    assert torch.equal(model(moe_tokens()[0]), expected)
    randomize(model)
    live = model(moe_tokens()[0])
    assert not torch.equal(live, expected)
    frozen = FrozenAdapter(model)
    randomize(model, seed=1)
    with torch.no_grad(), frozen.active():
        assert torch.equal(model(moe_tokens()[0]), live)
    with disable_adapters(model):
        assert torch.equal(model(moe_tokens()[0]), expected)
    detach(model)
    assert_same(before, snapshot(model))


def grouped(model: nn.Module, name: str) -> Any:
    return model.get_submodule(f"decoder.layers.0.mlp.experts.{name}")


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("splits", [[0, 0, 0, 0], [0, 5, 0, 0], torch.tensor([1, 0, 4, 2])], ids=str)
def test_experts_without_tokens_get_zero_gradients(splits: Any, rank: int) -> None:
    """Also a rank without any: its factors still take part in every reduction."""
    model = adapted(LoraConfig(rank=rank), torch.float32)
    sizes = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    linear = grouped(model, "linear_fc1")
    x = torch.randn(sum(sizes), 8, requires_grad=True)
    # A plain sum gives an expanded gradient.
    linear(x, splits if isinstance(splits, torch.Tensor) else sizes)[0].sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for parameter in linear.lora.parameters():
        assert parameter.grad is not None
        assert [bool(one.any()) for one in parameter.grad] == [size > 0 for size in sizes]


def _one_expert_lacks(model: MoeModel) -> None:
    del grouped(model, "linear_fc1").weight3


def _other_width(model: MoeModel) -> None:
    grouped(model, "linear_fc2").weight2 = nn.Parameter(torch.zeros(8, 10))


def _split_the_other_way(model: MoeModel) -> None:
    vars(grouped(model, "linear_fc2").weight0).update(tensor_model_parallel=True, partition_dim=0)


def _sequential(model: MoeModel) -> None:
    experts: Any = model.get_submodule("decoder.layers.0.mlp.experts")
    del experts.linear_fc1, experts.linear_fc2
    experts.local_experts = nn.ModuleList()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_one_expert_lacks, r"linear_fc1: holds the weights of 3 experts, .* give 4"),
        (_other_width, r"linear_fc2\.weight2: has shape \(8, 10\), .* give \(8, 12\)"),
        (_split_the_other_way, r"splits its weights along dimension 0, its site is declared ROW"),
        (_sequential, r"mlp\.experts: is a Experts, one module per expert.*moe_grouped_gemm=True"),
    ],
)
def test_a_host_that_cannot_carry_the_adapter_is_refused_unchanged(spoil: Any, words: str) -> None:
    """B7, B31: another expert layout than the table's is an error, not a base left without its adapter."""
    model = moe_model()
    spoil(model)
    before = snapshot(model)
    with pytest.raises(LoraError, match=words):
        attach(model, moe_plugin(), HF_CONFIG, LoraConfig(rank=4))
    assert_same(before, snapshot(model))


def test_parallel_sizes_of_another_run_are_refused() -> None:
    """B7: factors for ETP 2 on experts that are whole."""
    for facts, words in ((RunFacts(dp=2, etp=2), r"parallel sizes \(etp\)"), (RunFacts(dp=2, ep=2), "give 2")):
        with pytest.raises(LoraError, match=words):
            attach(moe_model(), moe_plugin(), HF_CONFIG, LoraConfig(rank=4), ParallelRun(facts=facts))


@pytest.mark.parametrize(
    ("name", "place", "same"),
    [
        ("linear_fc1", {"etp_rank": 1}, True),
        ("linear_fc2", {"etp_rank": 1}, False),
        ("linear_fc1", {"ep_rank": 1}, False),
        ("linear_fc1", {"expert_dp_rank": 1}, False),
    ],
    ids=str,
)
def test_dropout_masks_differ_where_the_tokens_do(name: str, place: dict[str, Any], same: bool) -> None:
    """B11: ranks of one ETP group see the same tokens, in whole where the width is not split; all others see theirs."""
    from lora_plugins_sdk.factors import LoraFactors
    from lora_plugins_sdk.table import derive_table

    facts, lora = RunFacts(dp=8, ep=2, etp=2), LoraConfig(rank=2, dropout=0.5)
    (plan, *_) = [one for one in derive_table(moe_plugin(), HF_CONFIG, lora, facts).plans if one.site.name == name]
    kept = []
    for run in (ParallelRun(facts=facts), ParallelRun(facts=facts, **place)):
        torch.manual_seed(0)
        kept.append(LoraFactors(plan, lora, run, torch.device("cpu")).drop(torch.ones(40, 8)))
    assert torch.equal(*kept) is same


def test_activation_recompute() -> None:
    x, weight = moe_tokens()
    grads = []
    for reentrant in (None, False, True):
        model = adapted(LoraConfig(rank=4), torch.float32)
        at = x.clone().requires_grad_()
        output = model(at) if reentrant is None else checkpoint(model, at, use_reentrant=reentrant)
        (output * weight).sum().backward()
        grads.append([parameter.grad for parameter in adapter_of(model).parameters()])
    for one in grads[1:]:
        assert all(map(torch.equal, one, grads[0]))
