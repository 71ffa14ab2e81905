"""Attach and detach: what they change, what they put back, what they refuse."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, assert_same, randomize, snapshot, toy_inputs, toy_model, toy_plugin
from torch import nn

from lora_plugins_sdk import LoraConfig, LoraError, adapter_of, attach, detach, export_adapter, hookimpl
from lora_plugins_sdk.site_handle import SiteHandle

LORA = LoraConfig(rank=2, alpha=4, target_modules=("all-linear", "lm_head"))


def test_a_fresh_adapter_changes_nothing_bit_for_bit() -> None:
    model, inputs = toy_model(), toy_inputs()
    base = model(*inputs)
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    assert torch.equal(model(*inputs), base)


def test_base_frozen_and_factors_trainable() -> None:
    model = toy_model()
    adapter = attach(model, toy_plugin(), HF_CONFIG, LORA)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if ".lora." in name}
    assert {name for name, _ in adapter.named_parameters()} == trainable
    factors = [parameter for name, parameter in model.named_parameters() if name in trainable]
    assert all(one.dtype == torch.float32 for one in factors)


def test_every_target_has_an_effect_and_a_gradient() -> None:
    """B20, B29, B36: a factor that reaches neither output nor optimizer trains nothing, silently."""
    model, inputs = toy_model(), toy_inputs()
    adapter = attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    out = model(*inputs)
    (out * torch.linspace(-1, 1, 7).double()).sum().backward()
    for name, parameter in adapter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-4, name
        kept = parameter.detach().clone()
        for row in range(parameter.shape[0]):
            with torch.no_grad():
                parameter[row] = 0
                assert not torch.equal(model(*inputs), out), f"{name} row {row} has no effect"
                parameter.copy_(kept)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_only_the_targets_are_adapted() -> None:
    model = toy_model()
    lora = LoraConfig(rank=2, target_modules=("q_proj", "v_proj"), exclude_modules=("*.layers.0.*",))
    adapter = attach(model, toy_plugin(), HF_CONFIG, lora)
    assert [name for name, _ in adapter.named_parameters()] == [
        f"decoder.layers.1.self_attention.linear_qkv.lora.{name}" for name in ("A", "B_q_proj", "B_v_proj")
    ]


def test_detach_restores_everything() -> None:
    model, inputs = toy_model(), toy_inputs()
    model.decoder.layers[0].mlp.requires_grad_(False)  # flags of the user's own
    before, base = snapshot(model), model(*inputs)
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    assert not torch.equal(model(*inputs), base)
    detach(model)
    assert_same(before, snapshot(model))
    assert torch.equal(model(*inputs), base)


def test_a_forward_that_someone_patched_before_is_put_back() -> None:
    model, calls = toy_model(), []
    linear = model.output_layer
    original = linear.forward

    def counted(x: torch.Tensor) -> Any:
        calls.append(1)
        return original(x)

    linear.forward = counted  # type: ignore[method-assign]
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    model(*toy_inputs())
    detach(model)
    assert vars(linear)["forward"] is counted and len(calls) == 1


def test_detach_and_attach_again() -> None:
    model, inputs = toy_model(), toy_inputs()
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    first = model(*inputs)
    detach(model)
    with pytest.raises(LoraError, match="has no adapter attached"):
        detach(model)
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    assert torch.equal(model(*inputs), first)


def test_double_attachment_is_refused() -> None:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    before = snapshot(model)
    with pytest.raises(LoraError, match=r"carries an adapter already.*detach it"):
        attach(model, toy_plugin(), HF_CONFIG, LORA)
    assert_same(before, snapshot(model))
    with pytest.raises(LoraError, match="carries an adapter already"):
        # A part of an adapted model does not know the adapter, but its linears do.
        part = nn.Module()
        part.decoder, part.vision = model.decoder, model.vision
        attach(part, toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
    assert_same(before, snapshot(model))


class FailsHalfWay:
    """Its fourth site cannot be attached."""

    def __init__(self) -> None:
        self.seen = 0
        self.errors: list[tuple[Exception, str]] = []

    @hookimpl
    def lora_attach_site(self, module: Any, plan: Any, lora: Any, run: Any, delta: Any) -> Any:
        self.seen += 1
        if self.seen == 4:
            raise RuntimeError("out of memory")
        return SiteHandle(module, plan, lora, run, delta)

    @hookimpl
    def lora_on_error(self, error: Exception, stage: str) -> None:
        self.errors.append((error, stage))


class FailsAfterwards:
    @hookimpl
    def lora_after_attach(self, adapter: Any) -> None:
        raise RuntimeError("observer failed")


def test_attach_that_fails_half_way_leaves_nothing() -> None:
    model, plugin = toy_model(), FailsHalfWay()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="out of memory") as error:
        attach(model, toy_plugin(plugin), HF_CONFIG, LORA)
    assert plugin.errors == [(error.value, "attach")]
    assert_same(before, snapshot(model))


def test_attach_whose_observer_fails_leaves_nothing() -> None:
    model = toy_model()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="observer failed"):
        attach(model, toy_plugin(FailsAfterwards()), HF_CONFIG, LORA)
    assert_same(before, snapshot(model))


def widen(model: ToyModel) -> None:
    model.output_layer.weight = nn.Parameter(torch.zeros(9, 12))


def drop_layer(model: ToyModel) -> None:
    model.decoder.layers = model.decoder.layers[:1]


def unfuse_norm(model: ToyModel) -> None:
    del model.get_submodule("decoder.layers.1.self_attention.linear_qkv").return_layernorm_output


def gather_output(model: ToyModel) -> None:
    model.output_layer.gather_output = True  # type: ignore[assignment]


def split_sequence(model: ToyModel) -> None:
    model.decoder.layers[0].mlp.linear_fc2.sequence_parallel = True  # type: ignore[assignment]


def wrap_buffers(model: ToyModel) -> None:
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]


def copy_tower(model: ToyModel) -> None:
    model.language_model = nn.Module()
    model.language_model.vision = copy.deepcopy(model.vision)


def fuse_norm(model: ToyModel) -> None:
    linear: Any = model.get_submodule("decoder.layers.1.mlp.linear_fc1")
    linear.layer_norm_weight = nn.Parameter(torch.ones(12))
    linear.return_layernorm_output = False


def split_columns(model: ToyModel) -> None:
    weight = model.output_layer.weight
    weight.tensor_model_parallel, weight.partition_dim = True, 1  # type: ignore[attr-defined]


def split_rows(model: ToyModel) -> None:
    weight: Any = model.get_parameter("decoder.layers.0.self_attention.linear_proj.weight")
    weight.tensor_model_parallel, weight.partition_dim = True, 0


def regroup_heads(model: ToyModel) -> None:
    linear: Any = model.get_submodule("decoder.layers.0.self_attention.linear_qkv")
    linear.config = SimpleNamespace(num_query_groups=4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            widen,
            r"output_layer: its weight has shape \(9, 12\), the HF config and run give \(7, 12\).*divisible_by=9\)",
        ),
        (drop_layer, r"decoder.layers.1.self_attention.linear_qkv and 3 more: is on no pipeline stage"),
        (unfuse_norm, r"decoder.layers.1.self_attention.linear_qkv: its norm is not fused"),
        (fuse_norm, r"decoder.layers.1.mlp.linear_fc1: normalises its input itself.*fused_norm=True"),
        (split_columns, r"output_layer: tensor parallelism splits its weight along dimension 1.*declared COLUMN"),
        (split_rows, r"layers.0.self_attention.linear_proj: .* along dimension 0.*declared ROW"),
        (regroup_heads, r"linear_qkv: was built with num_query_groups=4, the HF config gives num_key_value_heads=2"),
        (gather_output, r"output_layer: gathers its output over TP"),
        (split_sequence, r"decoder.layers.0.mlp.linear_fc2: was built with sequence_parallel=True"),
        (wrap_buffers, r"is wrapped for data parallelism already.*attach first, then wrap"),
        (copy_tower, r"vision.patch_linear: both 'vision.patch_linear' and 'language_model.vision.patch_linear'"),
    ],
)
def test_a_host_that_cannot_carry_the_adapter_is_refused_unchanged(spoil: Any, message: str) -> None:
    """B22: a layer that is nowhere is an error, not an adapter without it."""
    model = toy_model()
    spoil(model)
    before = snapshot(model)
    with pytest.raises(LoraError, match=message):
        attach(model, toy_plugin(), HF_CONFIG, LORA)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        ({}, LoraConfig(rank=2, target_modules=("q_porj",)), "did you mean 'q_proj'"),
        ({}, LoraConfig(rank=6), "rank=6: larger than"),
        ({"model_type": "other"}, LORA, "model_type 'other'"),
        ({"num_hidden_layers": 3}, LORA, "is on no pipeline stage"),
        ({"num_hidden_layers": 1}, LORA, r"decoder.layers.1.self_attention.linear_qkv and 3 more: lies beyond"),
        ({"intermediate_size": 8}, LORA, "its weight has shape"),
    ],
)
def test_a_request_that_cannot_be_met_changes_nothing(config: dict[str, Any], lora: LoraConfig, message: str) -> None:
    model = toy_model()
    before = snapshot(model)
    with pytest.raises(LoraError, match=message):
        attach(model, toy_plugin(), HF_CONFIG | config, lora)
    assert_same(before, snapshot(model))


def test_a_model_without_values_is_refused() -> None:
    model = toy_model()
    model.decoder.layers[1].mlp.to("meta")
    with pytest.raises(LoraError, match=r"decoder.layers.1.mlp.linear_fc1.weight: is on the meta device.*first"):
        attach(model, toy_plugin(), HF_CONFIG, LORA)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_adapter_is_found_through_wrappers() -> None:
    model = toy_model()
    adapter = attach(model, toy_plugin(), HF_CONFIG, LORA)
    wrapped = nn.Sequential(nn.Sequential(model))
    assert adapter_of(wrapped) is adapter
    assert adapter_of([wrapped]) is adapter


def test_wide_casts_keep_the_factors_dtype() -> None:
    """B35: fp32 factors need no master copy, unless a wrapper's cast takes their precision away."""
    model = toy_model()
    adapter = attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    before = [parameter.detach().clone() for parameter in adapter.parameters()]
    model.bfloat16()
    assert model.output_layer.weight.dtype == torch.bfloat16
    for parameter, value in zip(adapter.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32 and torch.equal(parameter, value)
    tokens, patches = toy_inputs(torch.bfloat16)
    assert model(tokens, patches).dtype == torch.bfloat16
    model.to("meta")
    assert all(parameter.device.type == "meta" for parameter in adapter.parameters())


def test_a_compiled_model_and_the_model_in_it_have_the_same_adapter() -> None:
    """Whichever of the two it was attached to."""
    for outer in (True, False):
        model = toy_model()
        compiled: Any = torch.compile(model, backend="eager")
        adapter = attach(compiled if outer else model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
        assert adapter_of(compiled) is adapter_of(model) is adapter
        assert export_adapter(compiled).tensors.keys() == export_adapter(model).tensors.keys()
        detach(compiled)
        with pytest.raises(LoraError, match="has no adapter attached"):
            adapter_of(model)
