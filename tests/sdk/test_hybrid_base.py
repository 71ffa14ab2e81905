"""Base tensors of a hybrid: sections, value heads, zero-centred norms, multimodal names, tensors left alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sdk_hybrid import HF_CONFIG, LAYERED
from torch import Tensor, nn

from lora_plugins_sdk import (
    Architecture,
    LoraConfig,
    LoraError,
    ParallelRun,
    RunFacts,
    SelectedPlugin,
    derive_table,
    load_base_weights,
)
from lora_plugins_sdk.targets import candidates

Tensors = dict[str, Tensor]
TEXT = HF_CONFIG | {"num_hidden_layers": 2, "full_attention_interval": 2}
VISION = {"model_type": "hybrid_vision", "text_config": TEXT, "vision_config": {"hidden_size": 3}}
LINEAR, FULL = "model.layers.0.linear_attn", "model.layers.1.self_attn"
ROWS = {
    f"{LINEAR}.in_proj_qkv": 24,
    f"{LINEAR}.in_proj_z": 12,
    f"{LINEAR}.in_proj_b": 4,
    f"{LINEAR}.in_proj_a": 4,
    f"{FULL}.q_proj": 24,
    f"{FULL}.k_proj": 6,
    f"{FULL}.v_proj": 6,
    "model.layers.0.mlp.gate": 3,
    "model.layers.1.mlp.gate": 3,
    "model.embed_tokens": 7,
    "lm_head": 7,
}


def hf_tensors() -> Tensors:
    """Every value is told from every other by its number."""
    draw = torch.Generator().manual_seed(2)
    tensors = {f"{name}.weight": torch.randn(rows, 12, generator=draw) for name, rows in ROWS.items()}
    return tensors | {
        f"{LINEAR}.conv1d.weight": torch.randn(24, 1, 4, generator=draw),
        f"{LINEAR}.A_log": torch.randn(4, generator=draw),
        f"{LINEAR}.norm.weight": 1 + torch.randn(3, generator=draw) / 8,
    }


def multimodal(tensors: Tensors) -> Tensors:
    named = {
        name if name.startswith("lm_head") else f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in tensors.items()
    }
    return named | {"model.visual.blocks.0.qkv.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(2)}


def empty_model(tp: int = 1) -> nn.Module:
    shapes = {
        "embedding.weight": (-(-7 // tp), 12),
        "decoder.layers.0.self_attention.in_proj.weight": (44 // tp, 12),
        "decoder.layers.0.self_attention.conv1d.weight": (24 // tp, 1, 4),
        "decoder.layers.0.self_attention.A_log": (4 // tp,),
        "decoder.layers.0.self_attention.out_norm.weight": (3,),
        "decoder.layers.0.mlp.router.weight": (3, 12),
        "decoder.layers.1.self_attention.linear_qkv.weight": (36 // tp, 12),
        "decoder.layers.1.mlp.router.weight": (3, 12),
        "head.weight": (7, 12),
    }
    model = nn.Module()
    for path, shape in shapes.items():
        *owners, leaf = path.split(".")
        module = model
        for owner in owners:
            if owner not in dict(module.named_children()):
                module.add_module(owner, nn.Module())
            module = module.get_submodule(owner)
        module.register_parameter(leaf, nn.Parameter(torch.full(shape, -7.0)))
    return model


def checkpoint(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def of_rank(tensor: Tensor, rank: int, tp: int, *sections: int) -> Tensor:
    """A rank's part of each section, written down apart from the SDK's packs."""
    parts = tensor.split(list(sections)) if sections else [tensor]
    return torch.cat([part.chunk(tp)[rank] for part in parts])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("config", [TEXT, VISION], ids=["text", "multimodal"])
def test_each_rank_loads_its_part(tmp_path: Path, config: dict[str, Any], tp: int) -> None:
    """B23: every section of a packed tensor is split on its own; norms that the host centres at zero lose their one."""
    hf = hf_tensors()
    directory = checkpoint(tmp_path, hf if config is TEXT else multimodal(hf), config)
    for rank in range(tp):
        model = empty_model(tp)
        run = ParallelRun(facts=RunFacts(tp=tp), tp_rank=rank)
        load_base_weights(model, SelectedPlugin.of(LAYERED), directory, run)
        in_proj = [
            of_rank(hf[f"{LINEAR}.in_proj_qkv.weight"], rank, tp, 6, 6, 12),
            *(of_rank(hf[f"{LINEAR}.in_proj_{leaf}.weight"], rank, tp) for leaf in "zba"),
        ]
        heads = hf[f"{FULL}.q_proj.weight"].view(2, 2, 2, 3, 12)  # [group, head, query or gate, width, in]
        groups = [
            torch.cat([heads[group].transpose(0, 1).reshape(-1, 12), *(key_value[group] for key_value in both)])
            for both in [[hf[f"{FULL}.{leaf}_proj.weight"].view(2, 3, 12) for leaf in "kv"]]
            for group in range(2)
        ]
        embedding = torch.cat([hf["model.embed_tokens.weight"], torch.zeros(-7 % tp, 12)])
        expected = {
            "embedding.weight": of_rank(embedding, rank, tp),
            "decoder.layers.0.self_attention.in_proj.weight": torch.cat(in_proj),
            "decoder.layers.0.self_attention.conv1d.weight": of_rank(hf[f"{LINEAR}.conv1d.weight"], rank, tp, 6, 6, 12),
            "decoder.layers.0.self_attention.A_log": of_rank(hf[f"{LINEAR}.A_log"], rank, tp),
            "decoder.layers.0.self_attention.out_norm.weight": hf[f"{LINEAR}.norm.weight"] - 1,
            "decoder.layers.0.mlp.router.weight": hf["model.layers.0.mlp.gate.weight"],
            "decoder.layers.1.self_attention.linear_qkv.weight": of_rank(torch.cat(groups), rank, tp),
            "decoder.layers.1.mlp.router.weight": hf["model.layers.1.mlp.gate.weight"],
            "head.weight": hf["lm_head.weight"],
        }
        assert expected.keys() == dict(model.named_parameters()).keys()
        for name, tensor in expected.items():
            assert torch.equal(model.get_parameter(name), tensor), name


def test_an_offset_is_added_before_the_value_is_rounded(tmp_path: Path) -> None:
    """1.00390625 - 1 is exact in bfloat16; taken after rounding to it, it would be zero."""
    tensors = hf_tensors()
    tensors[f"{LINEAR}.norm.weight"] = torch.full((3,), 1 + 2**-8)
    model = empty_model().bfloat16()
    load_base_weights(model, SelectedPlugin.of(LAYERED), checkpoint(tmp_path, tensors, TEXT))
    norm = model.get_parameter("decoder.layers.0.self_attention.out_norm.weight")
    assert torch.equal(norm, torch.full((3,), 2**-8, dtype=torch.bfloat16))


def refused(directory: Path, architecture: Architecture = LAYERED) -> LoraError:
    model = empty_model()
    with pytest.raises(LoraError) as error:
        load_base_weights(model, SelectedPlugin.of(architecture), directory)
    assert all(bool((parameter == -7).all()) for parameter in model.parameters())
    return error.value


@pytest.mark.parametrize(
    ("edit", "subject", "reason"),
    [
        (lambda tensors: tensors.update({"model.vision.stray": torch.zeros(1)}), "model.vision.stray", "has no place"),
        (
            lambda tensors: tensors.update({f"{FULL}.A_log": torch.zeros(4)}),
            f"{FULL}.A_log",
            "has no place in the model",
        ),
        (lambda tensors: tensors.pop(f"{LINEAR}.A_log"), f"{LINEAR}.A_log", "is missing from the checkpoint"),
        (
            lambda tensors: tensors.update({f"{LINEAR}.conv1d.weight": torch.zeros(25, 1, 4)}),
            f"{LINEAR}.conv1d.weight",
            "has 25 rows, the config gives sections of [6, 6, 12]",
        ),
    ],
    ids=["stray", "of-another-layer-type", "missing", "sections"],
)
def test_only_what_is_declared_is_left_alone(
    tmp_path: Path, edit: Callable[[Tensors], Any], subject: str, reason: str
) -> None:
    tensors = hf_tensors()
    edit(tensors)
    assert (subject, True) in [
        (one.subject, reason in one.reason) for one in refused(checkpoint(tmp_path, tensors, TEXT)).diagnostics
    ]


def test_names_of_the_other_wrapping_are_refused(tmp_path: Path) -> None:
    """B29: a config of the language model alone does not make up for the names of a multimodal checkpoint."""
    found = refused(checkpoint(tmp_path, multimodal(hf_tensors()), TEXT)).diagnostics
    reasons = {one.subject: one.reason for one in found}
    assert "is missing" in reasons["model.embed_tokens.weight"]
    assert "has no place" in reasons["model.language_model.embed_tokens.weight"]
    assert not any(name.startswith(("model.visual", "mtp")) for name in reasons)


def test_adapter_names_are_those_of_the_checkpoint() -> None:
    """B29: an adapter on a multimodal checkpoint names the modules that are in it."""
    plugin = SelectedPlugin.of(LAYERED)
    tables = [derive_table(plugin, config, LoraConfig(rank=2), RunFacts()) for config in (TEXT, VISION)]
    for text, wrapped in zip(tables[0].rows, tables[1].rows, strict=True):
        assert wrapped.hf_module == text.hf_module.replace("model.layers", "model.language_model.layers")
        assert wrapped.full_shape == text.full_shape and wrapped.host_module == text.host_module
    one = next(one for one in candidates(LAYERED, VISION) if one.projection.leaf == "q_proj")
    for target in (one.hf, "self_attn.q_proj", "*.layers.1.self_attn.q_proj", "linear_qkv"):
        assert one.matches(target)


def test_a_config_of_another_language_model() -> None:
    with pytest.raises(LoraError, match=r"model_type 'other': architecture 'layered' serves"):
        LAYERED.dims(VISION | {"text_config": TEXT | {"model_type": "other"}})
    assert LAYERED.dims(VISION).resolve("hidden_size") == 12


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*", r"wildcard '\*': begins with a wildcard"),
        ("", r"wildcard '': begins with a wildcard"),
        ("model.layers.*", r"leaves 'model.layers.\*' alone and needs 'model.layers.{layer}"),
    ],
)
def test_a_wildcard_cannot_take_what_the_model_needs(pattern: str, message: str) -> None:
    with pytest.raises(LoraError, match=message):
        replace(LAYERED, left_alone=(pattern,))
