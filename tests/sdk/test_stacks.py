"""HF parameters of several weights `[n, out, in]` that the host has side by side: weights, factors, files."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_plugins_sdk import (
    Architecture,
    LoraConfig,
    LoraError,
    ParallelRun,
    PeftAdapter,
    Projection,
    RunFacts,
    SelectedPlugin,
    Site,
    SiteKind,
    attach,
    derive_table,
    export_adapter,
    import_adapter,
    load_base_weights,
)
from lora_plugins_sdk.peft_parameters import from_parameters, hf_parameters, to_parameters

COUNT, HIDDEN, WIDTH = 3, 4, 2  # three MLPs of two units each, side by side
CONFIG = {"model_type": "toy_stack", "num_hidden_layers": 1, "hidden_size": HIDDEN, "units": COUNT * WIDTH, "n": COUNT}


def _site(leaf: str, kind: SiteKind, in_dim: str, out_dim: str, stack: str = "n", **more: object) -> Site:
    projection = Projection(hf=f"model.layers.{{layer}}.{leaf}", in_dim=in_dim, out_dim=out_dim, stack=stack)
    return Site(path=f"layers.{{layer}}.{leaf}", kind=kind, projections=(projection,), **more)  # type: ignore[arg-type]


ARCHITECTURE = Architecture(
    name="toy_stack",
    model_types=("toy_stack",),
    sites=(
        _site("up", SiteKind.COLUMN, "hidden_size", "units"),
        _site("down", SiteKind.ROW, "units", "hidden_size"),
    ),
)
PLUGIN = SelectedPlugin.of(ARCHITECTURE)


class Linear(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, width))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.t(), None


def model(tp: int = 1) -> nn.Module:
    layer = nn.Module()
    layer.up, layer.down = Linear(HIDDEN, COUNT * WIDTH // tp), Linear(COUNT * WIDTH // tp, HIDDEN)
    whole = nn.Module()
    whole.layers = nn.ModuleList([layer])
    return whole


def hf_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model.layers.0.up": torch.randn(COUNT, WIDTH, HIDDEN, generator=generator),
        "model.layers.0.down": torch.randn(COUNT, HIDDEN, WIDTH, generator=generator),
    }


def checkpoint(place: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    save_file(tensors or hf_weights(), place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_base_weights_side_by_side(tp: int, tmp_path: Path) -> None:
    """With 2 ranks one of the three weights is cut through."""
    directory, hf = checkpoint(tmp_path), hf_weights()
    up = torch.cat(list(hf["model.layers.0.up"]))
    down = torch.cat(list(hf["model.layers.0.down"]), dim=1)
    for rank in range(tp):
        mine = model(tp)
        load_base_weights(mine, PLUGIN, directory, ParallelRun(facts=RunFacts(tp=tp), tp_rank=rank))
        assert torch.equal(mine.get_parameter("layers.0.up.weight"), up.chunk(tp)[rank])
        assert torch.equal(mine.get_parameter("layers.0.down.weight"), down.chunk(tp, dim=1)[rank])


def test_the_adapter_is_one_pair_per_weight_with_one_factor_shared() -> None:
    hf, host = hf_weights(), model()
    attach(host, PLUGIN, CONFIG, LoraConfig(rank=2, alpha=2, target_modules=("*",)))
    saved = export_adapter(host)
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(one.shape, generator=generator) for name, one in saved.tensors.items()}
    name = "base_model.model.model.layers.0.{}.lora_{}.weight".format
    shapes = {
        name("up", "A"): (1, 2, HIDDEN),
        name("up", "B"): (COUNT, WIDTH, 2),
        name("down", "A"): (COUNT, 2, WIDTH),
        name("down", "B"): (1, HIDDEN, 2),
    }
    assert {key: tuple(one.shape) for key, one in tensors.items()} == shapes
    import_adapter(host, type(saved)(tensors=tensors, config=saved.config))
    again = export_adapter(host).tensors
    assert all(torch.equal(again[key], one) for key, one in tensors.items())
    x = torch.randn(5, HIDDEN, generator=generator)
    host.get_parameter("layers.0.up.weight").data.copy_(hf["model.layers.0.up"].flatten(0, 1))
    host.get_parameter("layers.0.down.weight").data.copy_(torch.cat(list(hf["model.layers.0.down"]), dim=1))
    units, _ = host.get_submodule("layers.0.up")(x)
    y, _ = host.get_submodule("layers.0.down")(units)
    expected = torch.zeros(5, HIDDEN)
    for one in range(COUNT):
        up = hf["model.layers.0.up"][one] + tensors[name("up", "B")][one] @ tensors[name("up", "A")][0]
        down = hf["model.layers.0.down"][one] + tensors[name("down", "B")][0] @ tensors[name("down", "A")][one]
        expected += x @ up.t() @ down.t()
    torch.testing.assert_close(y, expected)


HEAD = Architecture(
    name="toy_head",
    model_types=("toy_stack",),
    sites=(
        _site("up", SiteKind.COLUMN, "hidden_size", "units"),
        Site(
            path="head",
            kind=SiteKind.COLUMN,
            projections=(Projection(hf="head", in_dim="hidden_size", out_dim="tokens", padded_to="padded"),),
        ),
    ),
)
PADDED = CONFIG | {"tokens": 5, "padded": 7}


def saved_adapter(architecture: Architecture, config: Mapping[str, object]) -> PeftAdapter:
    """A random adapter on every target as a file holds it."""
    plugin, generator, tensors = SelectedPlugin.of(architecture), torch.Generator().manual_seed(3), {}
    for row in derive_table(plugin, config, LoraConfig(rank=2, target_modules=("*",)), RunFacts()).rows:
        tensors |= plugin.export_tensor(row, torch.randn(row.full_shape, generator=generator))
    modules = sorted({name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors})
    return PeftAdapter(tensors=tensors, config={"r": 2, "lora_alpha": 2, "target_modules": modules})


@pytest.mark.parametrize(("architecture", "config"), [(ARCHITECTURE, CONFIG), (HEAD, PADDED)], ids=["stacks", "head"])
def test_peft_has_one_pair_per_parameter(architecture: Architecture, config: Mapping[str, object]) -> None:
    """In PEFT's form a stack's shared factor stands once per weight, and a padded head's B has rows of zeros."""
    saved, parameters = saved_adapter(architecture, config), hf_parameters(architecture, config)
    fused = to_parameters(saved, parameters)
    name = "base_model.model.{}.lora_{}.weight".format
    for number, one in enumerate(parameters, start=1):
        within = ".base_layer" * sum(later.module == one.module for later in parameters[number:])
        a, b = (fused.tensors[name(one.module + within, factor)] for factor in "AB")
        deltas = torch.einsum("ore,eri->eoi", b.unflatten(1, (-1, one.experts)), a.unflatten(0, (one.experts, -1)))
        own = {factor: saved.tensors[name(one.projections[0], factor)] for factor in "AB"}
        expected = (own["B"] @ own["A"]).expand(one.experts, -1, -1)
        torch.testing.assert_close(deltas[:, : expected.shape[1]], expected)
        assert deltas.shape[1] == expected.shape[1] + one.padding and not deltas[:, expected.shape[1] :].any()
    back = from_parameters(fused, parameters)
    assert back.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(back.tensors[key], tensor) for key, tensor in saved.tensors.items())


def test_factors_that_no_stack_or_padded_head_has_are_refused() -> None:
    parameters = hf_parameters(HEAD, PADDED)
    fused = to_parameters(saved_adapter(HEAD, PADDED), parameters)
    for key, said in (
        ("layers.0.lora_A", "each of its 3 weights has a factor A of its own"),
        ("head.lora_B", "the last 2 rows of its B are padding and not zero"),
    ):
        name = next(one for one in fused.tensors if key in one)
        changed = dict(fused.tensors) | {name: torch.randn_like(fused.tensors[name])}
        with pytest.raises(LoraError, match=said):
            from_parameters(replace(fused, tensors=changed), parameters)


def test_shapes_that_do_not_fit(tmp_path: Path) -> None:
    tensors = hf_weights()
    wrong = tensors | {"model.layers.0.up": tensors["model.layers.0.up"][:2]}
    with pytest.raises(LoraError, match=r"up\.weight: has shape \[4, 4\], the config gives \[6, 4\]"):
        load_base_weights(model(), PLUGIN, checkpoint(tmp_path, wrong))


@pytest.mark.parametrize("more", [{"kind": SiteKind.REPLICATED}, {"kind": SiteKind.COLUMN, "experts": "n"}])
def test_declarations_that_contradict_themselves(more: dict[str, object]) -> None:
    with pytest.raises(LoraError, match="layers"):
        _site("experts.{expert}" if "experts" in more else "up", in_dim="units", out_dim="units", **more)  # type: ignore[arg-type]


def test_a_stack_that_does_not_divide_the_width() -> None:
    with pytest.raises(LoraError, match="a stack of 4 weights: does not divide their 6 rows or columns"):
        derive_table(PLUGIN, CONFIG | {"n": 4}, LoraConfig(rank=2, target_modules=("*",)), RunFacts())
