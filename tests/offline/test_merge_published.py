"""Inkling as it is published: other names, and rows of gate and up in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offline_files import ALPHA, PREFIX, RANK, make_adapter, make_base, weights
from torch import Tensor

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.offline import shard
from lora_plugins_sdk.offline.merge import merge, plan_merge

HIDDEN, INNER, EXPERTS, SHARED, VOCABULARY, PADDED = 8, 6, 3, 2, 11, 12
SCALE = ALPHA / RANK
LAYER = "model.layers.1."
MODULES: dict[str, tuple[int, int]] = {
    f"{LAYER}self_attn.q_proj": (10, HIDDEN),
    f"{LAYER}self_attn.k_proj": (4, HIDDEN),
    f"{LAYER}self_attn.v_proj": (4, HIDDEN),
    f"{LAYER}self_attn.r_proj": (5, HIDDEN),
    f"{LAYER}self_attn.o_proj": (HIDDEN, 10),
    "model.layers.0.mlp.gate_proj": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
    "lm_head": (VOCABULARY, HIDDEN),
}
EXPERT: dict[str, tuple[int, int]] = {
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}
BLOCKS = {"experts": EXPERTS, "shared_experts": SHARED}
EMBEDDING = "model.embed_tokens"


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Row 0 of gate, row 0 of up, row 1 of gate ..."""
    out = torch.empty(*gate.shape[:-2], 2 * gate.shape[-2], gate.shape[-1])
    out[..., 0::2, :], out[..., 1::2, :] = gate, up
    return out


def model() -> dict[str, Tensor]:
    """Weights by transformers' names; experts stacked."""
    torch.manual_seed(1)
    tensors = {f"{module}.weight": torch.randn(shape) for module, shape in MODULES.items()}
    tensors["lm_head.weight"] = torch.randn(PADDED, HIDDEN)
    tensors[f"{EMBEDDING}.weight"] = torch.randn(PADDED, HIDDEN)
    for block, count in BLOCKS.items():
        tensors |= {f"{LAYER}mlp.{block}.{leaf}": torch.randn(count, *shape) for leaf, shape in EXPERT.items()}
    return tensors


def published(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    llm, one = "model.llm.layers.0.", "model.llm.layers.1."
    names = {"q_proj": "wq_du", "k_proj": "wk_dv", "v_proj": "wv_dv", "r_proj": "wr_du", "o_proj": "wo_ud"}
    found = {f"{one}attn.{new}.weight": hf[f"{LAYER}self_attn.{old}.weight"] for old, new in names.items()}
    found["model.llm.unembed.weight"] = hf["lm_head.weight"]
    found["model.llm.embed.weight"] = hf[f"{EMBEDDING}.weight"]
    dense = [hf[f"model.layers.0.mlp.{leaf}.weight"] for leaf in EXPERT]
    found |= {f"{llm}mlp.w13_dn.weight": in_turn(*dense[:2]), f"{llm}mlp.w2_md.weight": dense[2]}
    for block, stem in (("experts", ""), ("shared_experts", "shared_")):
        gate, up, down = (hf[f"{LAYER}mlp.{block}.{leaf}"] for leaf in EXPERT)
        found |= {f"{one}mlp.{block}.{stem}w13_weight": in_turn(gate, up), f"{one}mlp.{block}.{stem}w2_weight": down}
    return found


def adapter() -> dict[str, Tensor]:
    """Plain linears, the embedding, and packed experts with shared outer factors."""
    torch.manual_seed(2)
    tensors = {}
    for module, (out, width) in MODULES.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(RANK, width)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, RANK)
    tensors[f"{PREFIX}{EMBEDDING}.lora_embedding_A"] = torch.randn(RANK, VOCABULARY)
    tensors[f"{PREFIX}{EMBEDDING}.lora_embedding_B"] = torch.randn(HIDDEN, RANK)
    for block, count in BLOCKS.items():
        for leaf, (out, width) in EXPERT.items():
            down, name = leaf == "down_proj", f"{PREFIX}{LAYER}mlp.{block}.{leaf}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(count if down else 1, RANK, width)
            tensors[f"{name}.lora_B.weight"] = torch.randn(1 if down else count, out, RANK)
    return tensors


def merged(hf: dict[str, Tensor], factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums, by transformers' names."""
    sums = dict(hf)
    for name, a in factors.items():
        if ".lora_A." in name or ".lora_embedding_A" in name:
            module = name.removeprefix(PREFIX).rsplit(".lora_", 1)[0]
            weight = f"{module}.weight" if module in MODULES or module == EMBEDDING else module
            delta = SCALE * (factors[name.replace("_A", "_B")].double() @ a.double())
            delta = delta.T if module == EMBEDDING else delta
            target = sums[weight].double().clone()
            target[..., : delta.shape[-2], :] += delta
            sums[weight] = target.float()
    return sums


@pytest.mark.parametrize("chunk", [1, 20, 2**18], ids=["row by row", "across experts", "whole"])
def test_every_linear_gets_its_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """B32: interleaved rows; the padded vocabulary's rows stay as they are (B42)."""
    monkeypatch.setattr(shard, "_CHUNK_ELEMENTS", chunk)
    base = make_base(tmp_path / "base", published(model()), vocab_size=PADDED, unpadded_vocab_size=VOCABULARY)
    saved = make_adapter(tmp_path / "adapter", adapter(), target_modules=["q_proj"])
    report = merge(plan_merge(base, saved, tmp_path / "merged"))
    found, expected = weights(tmp_path / "merged"), published(merged(model(), adapter()))
    assert report.folds == len(MODULES) + 1 + 3 * (EXPERTS + SHARED) and report.changed == len(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    for name, hf in (("unembed", "lm_head"), ("embed", EMBEDDING)):
        assert torch.equal(found[f"model.llm.{name}.weight"][VOCABULARY:], model()[f"{hf}.weight"][VOCABULARY:])


def test_names_and_shapes_must_fit_each_other(tmp_path: Path) -> None:
    """B33."""
    tensors = published(model())
    tensors["model.llm.layers.1.mlp.experts.w2_weight"] = torch.zeros(EXPERTS, INNER, HIDDEN)
    tensors["model.llm.layers.0.mlp.w13_dn.weight"] = torch.zeros(2, INNER, HIDDEN)
    base = make_base(tmp_path / "base", tensors, vocab_size=PADDED, unpadded_vocab_size=VOCABULARY)
    with pytest.raises(LoraError) as error:
        plan_merge(base, make_adapter(tmp_path / "adapter", adapter()), tmp_path / "merged")
    assert {one.subject for one in error.value.diagnostics} >= {
        "model.llm.layers.1.mlp.experts.w2_weight",
        "model.layers.0.mlp.gate_proj",
    }
