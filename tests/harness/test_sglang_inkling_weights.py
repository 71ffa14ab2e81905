"""A published Inkling's tensors as SGLang 0.5.23 holds them: the names that it reports, and the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_harness.engines.sglang.sync.engine_weights import EngineWeight, engine_weights
from lora_plugin_inkling.model.published import PAIRINGS
from lora_plugins_sdk.weight_files import read_weight_files

HF: dict[str, Any] = {"model_type": "inkling_mm_model", "text_config": {}}
HIDDEN, EXPERTS, SHARED, WIDTH = 4, 6, 2, 3
SHAPES = {
    "embed.weight": (70, HIDDEN),
    "unembed.weight": (70, HIDDEN),
    "layers.0.mlp.gate.weight": (EXPERTS + SHARED + 1, HIDDEN),
    "layers.0.mlp.shared_experts.shared_w2_weight": (SHARED, HIDDEN, WIDTH),
}
# As SGLang reports them; what is not here is named `llm.` for `model.llm.` and otherwise alike.
RENAMED = {
    "embed.weight": "embed_tokens.weight",
    "unembed.weight": "lm_head.weight",
    **{f"layers.0.attn.{leaf}.weight": "layers.0.attn.qkvr.weight" for leaf in ("wq_du", "wk_dv", "wv_dv", "wr_du")},
    "layers.0.mlp.w13_dn.weight": "layers.0.mlp.gate_up_proj.weight",
    "layers.0.mlp.w2_md.weight": "layers.0.mlp.down_proj.weight",
    "layers.0.mlp.shared_experts.shared_w13_weight": "layers.0.mlp.shared_experts.w13_weight",
    "layers.0.mlp.shared_experts.shared_w2_weight": "layers.0.mlp.shared_experts.w2_weight",
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """One of each published tensor."""
    names = [one.published.format(layer=0) for one in PAIRINGS]
    return {name: torch.randn(SHAPES.get(name, (2, HIDDEN))).bfloat16() for name in names}


@pytest.fixture(scope="module")
def held(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineWeight]:
    folder: Path = tmp_path_factory.mktemp("published")
    stored = {f"model.llm.{name}": one for name, one in tensors.items()}
    save_file({**stored, "model.visual.layers.0.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    return engine_weights(read_weight_files(folder), HF)


def test_every_tensor_is_in_the_parameter_that_sglang_reports(
    tensors: dict[str, Tensor], held: dict[str, EngineWeight]
) -> None:
    reported = {f"llm.{RENAMED.get(name, name)}" for name in tensors}
    assert held.keys() == {*reported, "llm.layers.0.mlp.shared_experts._w2_lin"}
    for name in tensors:
        assert f"model.llm.{name}" in held[f"llm.{RENAMED.get(name, name)}"].parts
    qkvr = [f"model.llm.layers.0.attn.{leaf}.weight" for leaf in ("wq_du", "wk_dv", "wv_dv", "wr_du")]
    assert list(held["llm.layers.0.attn.qkvr.weight"].parts) == qkvr


def whole(held: dict[str, EngineWeight], tensors: dict[str, Tensor], name: str) -> Tensor:
    weight = held[f"llm.{name}"]
    return weight.whole((tensors[part.removeprefix("model.llm.")] for part in weight.parts), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "published", "rows"),
    [
        ("lm_head.weight", "unembed.weight", 128),
        ("embed_tokens.weight", "embed.weight", 128),
        ("layers.0.mlp.gate.weight", "layers.0.mlp.gate.weight", 16),
    ],
)
def test_padding_is_zeros(
    held: dict[str, EngineWeight], tensors: dict[str, Tensor], name: str, published: str, rows: int
) -> None:
    found, stored = whole(held, tensors, name), tensors[published]
    assert len(found) == rows and torch.equal(found[: len(stored)], stored) and not found[len(stored) :].any()


def test_shared_experts_are_there_a_second_time_side_by_side(
    held: dict[str, EngineWeight], tensors: dict[str, Tensor]
) -> None:
    down = tensors["layers.0.mlp.shared_experts.shared_w2_weight"]
    found = whole(held, tensors, "layers.0.mlp.shared_experts._w2_lin")
    assert found.is_contiguous() and torch.equal(found.reshape(SHARED * WIDTH, HIDDEN), torch.cat([*down], dim=1).T)


@pytest.mark.parametrize("leaf", ["gate.bias", "gate.global_scale"])
def test_what_chooses_experts_is_in_float32(
    held: dict[str, EngineWeight], tensors: dict[str, Tensor], leaf: str
) -> None:
    assert whole(held, tensors, f"layers.0.mlp.{leaf}").dtype == torch.float32
