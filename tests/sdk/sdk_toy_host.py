"""A one-process host model for the toy architecture: linears that keep megatron-core's contract, nothing else."""

from __future__ import annotations

from typing import Any

import torch
from sdk_toy import ARCHITECTURE, HF_CONFIG
from torch import Tensor, nn

from lora_plugins_sdk import SelectedPlugin
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import site_layout


class Linear(nn.Module):
    """`forward(x) -> (output, bias)`; with a norm inside, `((output, normed), bias)` when asked to."""

    def __init__(self, width: int, out: int, *, norm: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        if norm:
            self.layer_norm_weight = nn.Parameter(torch.empty(width))
            self.return_layernorm_output = False

    def forward(self, x: Tensor) -> tuple[Any, Tensor | None]:
        if not hasattr(self, "layer_norm_weight"):
            return x @ self.weight.t(), None
        normed = nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, 1e-6)
        output = normed @ self.weight.t()
        return ((output, normed), None) if self.return_layernorm_output else (output, None)


class Attention(nn.Module):
    """Mixes q, k and v of each group over the tokens before it; enough to make each projection matter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = Linear(12, 24, norm=True), Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        qkv, _ = self.linear_qkv(x)
        q, k, v = qkv.view(*qkv.shape[:-1], 2, 12).split([6, 3, 3], dim=-1)  # two groups of two query heads
        mixed = q * torch.tanh(k).cumsum(0).repeat(1, 1, 1, 2) + v.cumsum(0).repeat(1, 1, 1, 2)
        return self.linear_proj(mixed.flatten(-2))[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Linear(12, 20), Linear(10, 12)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x)[0].chunk(2, dim=-1)
        return self.linear_fc2(torch.tanh(gate) * up)[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_linear = Linear(5, 12)


class ToyModel(nn.Module):
    """`forward(tokens [s, b], patches [s, b, 5]) -> [s, b, vocabulary]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 12)
        self.decoder, self.vision, self.output_layer = Decoder(), Vision(), Linear(12, 7)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.vision.patch_linear(patches)[0]
        for layer in self.decoder.layers:
            x = layer(x)
        return self.output_layer(x)[0]


def toy_model(dtype: torch.dtype = torch.float64) -> ToyModel:
    """A model with fixed values; double precision, so that comparisons are sharp."""
    model = ToyModel().to(dtype)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator) * 0.25
        parameter.data.copy_(value + (1 if parameter.dim() == 1 else 0))
    return model


def toy_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return (
        torch.randint(0, 7, (5, 2), generator=generator),
        torch.randn(5, 2, 5, generator=generator).to(dtype),
    )


def toy_plugin(plugin: Any = None) -> SelectedPlugin:
    """The toy architecture, with a plugin object's overrides."""
    return SelectedPlugin.of(ARCHITECTURE, plugin)


def hf_weights(model: ToyModel) -> dict[str, Tensor]:
    """HF tensors of the model, unpacked row by row along `host_index` (not the way the SDK loads them)."""
    dims = ARCHITECTURE.dims(HF_CONFIG)
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": model.embedding.weight}
    for site in ARCHITECTURE.sites:
        layout = site_layout(site, dims, RunFacts())
        for layer in range(2) if site.per_layer else [0]:
            weight = model.get_parameter(f"{site.path.format(layer=layer)}.weight")
            rows: dict[int, list[Tensor]] = {}
            for (projection, _), row in zip(layout.host_index(), weight, strict=True):
                rows.setdefault(projection, []).append(row)
            for index, projection in enumerate(site.projections):
                tensors[f"{projection.hf.format(layer=layer)}.weight"] = torch.stack(rows[index])
    for layer in range(2):
        norm = model.get_parameter(f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight")
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = norm
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give every factor of the attached adapter values of its own, B included."""
    from lora_plugins_sdk import adapter_of

    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_of(model).parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that attach may touch: parameters, flags, instance attributes, hooks."""
    return {
        "parameters": {name: (value.requires_grad, value.detach().clone()) for name, value in model.named_parameters()},
        "attributes": {
            name: {key: value for key, value in vars(module).items() if not key.startswith("_")}
            for name, module in model.named_modules()
        },
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "modules": [name for name, _ in model.named_modules()],
        "adapter": [name for name, module in model.named_modules() if "_lora_adapter" in vars(module)],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in ("attributes", "hooks", "modules", "adapter"):
        assert before[key] == after[key], key
    assert before["parameters"].keys() == after["parameters"].keys()
    for name, (flag, value) in before["parameters"].items():
        now_flag, now_value = after["parameters"][name]
        assert flag == now_flag and torch.equal(value, now_value), name
