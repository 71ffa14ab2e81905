"""SGLang's form back to PEFT's: the same products, and the same SGLang form again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sglang_names import EXPERTS, HF, HIDDEN, HYBRID, INNER, PREFIX, RANK, factors, linear, served
from torch import Tensor

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.serving.sglang import for_sglang
from lora_plugins_sdk.serving.sglang_import import from_sglang

INKLING = {"text_config": {"model_type": "inkling_text", "num_hidden_layers": 2}}
PACKED = {
    "layers__0__mlp__experts__gate_proj": ((1, RANK, HIDDEN), (EXPERTS, INNER, RANK)),
    "layers__0__mlp__experts__up_proj": ((1, RANK, HIDDEN), (EXPERTS, INNER, RANK)),
    "layers__0__mlp__experts__down_proj": ((EXPERTS, RANK, INNER), (1, HIDDEN, RANK)),
}
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (HF, {f"layers__1__self_attn__{leaf}_proj": linear(width) for leaf, width in (("q", 20), ("v", 10))}),
    "delta net": (
        HYBRID,
        {"layers__0__linear_attn__in_proj_qkv": linear(20), "layers__0__linear_attn__out_proj": linear(HIDDEN, 8)},
    ),
    "z alone": (HYBRID, {"layers__0__linear_attn__in_proj_z": linear(8)}),
    "shared outer experts": (HYBRID, PACKED),
    "experts": (HYBRID, {f"layers__1__mlp__experts__{n}__up_proj": linear(INNER) for n in range(EXPERTS)}),
    "inkling": (
        INKLING,
        {f"layers__0__self_attn__{leaf}_proj": linear(10) for leaf in "qkvr"}
        | {"layers__0__self_attn__o_proj": linear(HIDDEN, 10), "layers__1__mlp__down_proj": linear(HIDDEN, INNER)},
    ),
}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("name", ADAPTERS)
def test_there_and_back(name: str, prefix: str) -> None:
    hf, modules = ADAPTERS[name]
    given = {f"base_model.model.{prefix}{key.removeprefix(PREFIX)}": one for key, one in factors(**modules).items()}
    given["base_model.model.lm_head.lora_A.weight"] = torch.randn(RANK, HIDDEN)
    given["base_model.model.lm_head.lora_B.weight"] = torch.randn(30, RANK)
    given[f"base_model.model.{prefix}embed_tokens.lora_embedding_A"] = torch.randn(RANK, 30)
    given[f"base_model.model.{prefix}embed_tokens.lora_embedding_B"] = torch.randn(HIDDEN, RANK)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "use_rslora": True}
    form = for_sglang(given, config, hf)
    assert {"base_model.model.model.embed_tokens.lora_embedding_A", "base_model.model.lm_head.lora_A.weight"} <= set(
        form.tensors
    )
    back = from_sglang(form.tensors, form.config, hf, [f"{prefix}layers.0.input_layernorm.weight", "lm_head.weight"])
    assert back.tensors.keys() == given.keys()
    assert all(torch.equal(back.tensors[key], one) for key, one in given.items())
    assert back.config["lora_alpha"] == form.config["lora_alpha"] and not back.config.get("use_rslora")
    again = for_sglang(back.tensors, back.config, hf)
    assert again.config == form.config and again.shared_outer_experts == form.shared_outer_experts
    assert all(torch.equal(again.tensors[key], one) for key, one in form.tensors.items())


def test_the_padding_of_a_vocabulary_comes_and_goes() -> None:
    hf = {"model_type": "inkling_text", "num_hidden_layers": 2, "vocab_size": 32, "unpadded_vocab_size": 30}
    a, b = torch.randn(RANK, 32), torch.randn(HIDDEN, RANK)
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}
    with pytest.raises(
        LoraError, match="32 columns of lora_embedding_A, and those beyond 30 are padding and not all zero"
    ):
        for_sglang({f"{stem}A": a, f"{stem}B": b}, config, hf)
    a[:, 30:] = 0
    form = for_sglang({f"{stem}A": a, f"{stem}B": b}, config, hf)
    assert torch.equal(form.tensors[f"{stem}A"], a[:, :30])
    back = from_sglang(form.tensors, form.config, hf, ["model.layers.0.input_layernorm.weight"])
    assert torch.equal(back.tensors[f"{stem}A"], a) and torch.equal(back.tensors[f"{stem}B"], b)


def test_factors_of_an_embedding_beside_a_linear_are_refused() -> None:
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_"
    given = {f"{stem}A": torch.randn(RANK, HIDDEN), f"{stem}B": torch.randn(HIDDEN, RANK)}
    with pytest.raises(LoraError, match="is no LoRA factor of a linear or of the embedding"):
        for_sglang(given, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}, HF)


@pytest.mark.parametrize("layout", ["experts", "shared outer experts", None])
@pytest.mark.parametrize(
    ("hf", "prefix"),
    [({"model_type": "inkling_text", "num_hidden_layers": 2}, "model."), (INKLING, "model.language_model.")],
)
def test_a_published_inkling_gets_hf_names_and_one_shared_factor(
    layout: str | None, hf: dict[str, Any], prefix: str
) -> None:
    """Its files' own prefix is none of HF's, and shared experts have copies beside routed ones with factors of their
    own; with either the trainer and a merge would not take the adapter."""
    modules = {
        **{f"layers__1__mlp__shared_experts__{key.rsplit('__', 1)[-1]}": shape for key, shape in PACKED.items()},
        **(ADAPTERS[layout][1] if layout else {}),
        "layers__0__self_attn__q_proj": linear(10),
    }
    hf = {**hf, **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "d_rel"), 2)}
    given = {f"base_model.model.{prefix}{key.removeprefix(PREFIX)}": one for key, one in factors(**modules).items()}
    form = for_sglang(given, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}, {**hf, "layer_types": ["hybrid"] * 2})
    back = from_sglang(form.tensors, form.config, hf, ["model.llm.layers.0.attn.wq_du.weight"])
    assert back.tensors.keys() == given.keys()
    assert all(torch.equal(back.tensors[key], one) for key, one in given.items())


def test_what_fills_a_group_is_named() -> None:
    form = served(factors(layers__1__self_attn__q_proj=linear(20)))
    back = from_sglang(form.tensors, form.config, HF, ["model.layers.0.mlp.up_proj.weight"])
    assert back.left_out == ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj")
    assert back.config["target_modules"] == ["q_proj"]


def hybrid_form() -> dict[str, Tensor]:
    return dict(served(factors(layers__0__linear_attn__in_proj_qkv=linear(20)), HYBRID).tensors)


@pytest.mark.parametrize("change", ["other A", "one of three"])
def test_three_projections_that_are_not_one(change: str) -> None:
    tensors = hybrid_form()
    name = f"{PREFIX}layers.0.linear_attn.in_proj_k"
    if change == "other A":
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
    else:
        del tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    with pytest.raises(LoraError, match=r"in_proj_q, .*in_proj_k and .*in_proj_v: have different lora_A"):
        back(tensors)


def test_rows_of_zeros_in_a_projection_whose_a_is_zero() -> None:
    """With A at zero nothing but B tells rows that are zero from members that fill a group up."""
    pair = factors(layers__0__linear_attn__in_proj_qkv=linear(20))
    a, b = pair
    pair[a].zero_()
    pair[b][:6].zero_()
    form = served(pair, HYBRID)
    assert not form.tensors[f"{PREFIX}layers.0.linear_attn.in_proj_q.lora_B.weight"].any()
    found = from_sglang(form.tensors, form.config, HYBRID, ["model.layers.0.mlp.up_proj.weight"])
    assert found.tensors.keys() == pair.keys()
    assert all(torch.equal(found.tensors[name], one) for name, one in pair.items())
    assert found.left_out == ("model.layers.0.linear_attn.in_proj_z",)


def back(tensors: dict[str, Tensor], names: tuple[str, ...] = ("model.layers.0.mlp.up_proj.weight",)) -> None:
    from_sglang(tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}, HYBRID, names)


def test_names_that_are_not_sglangs() -> None:
    tensors = hybrid_form()
    with pytest.raises(LoraError, match=r"visual.*is no name of SGLang's form"):
        back({**tensors, "base_model.model.visual.lora_A.weight": torch.randn(RANK, 3)})
    router = {f"{PREFIX}layers.0.mlp.gate.lora_{factor}.weight": torch.randn(RANK, RANK) for factor in "AB"}
    with pytest.raises(LoraError, match=r"mlp\.gate: is no name of SGLang's form"):
        back({**tensors, **router})
    # HF's name of what SGLang calls attn.wq_du.
    attention = {f"{PREFIX}layers.0.self_attn.q_proj.lora_{factor}.weight": torch.ones(RANK, RANK) for factor in "AB"}
    with pytest.raises(LoraError, match=r"self_attn\.q_proj: is no name of SGLang's form"):
        from_sglang(attention, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}, INKLING, ["model.llm.layers.0.x"])
    with pytest.raises(LoraError, match=r"out_proj: has one factor of two"):
        back({**tensors, f"{PREFIX}layers.0.linear_attn.out_proj.lora_A.weight": torch.randn(RANK, 8)})
    with pytest.raises(LoraError, match=r"base: its layers' names begin with model\. and model\.language_model\."):
        back(tensors, ("model.layers.0.a", "model.language_model.layers.0.a"))
    with pytest.raises(LoraError, match=r"base: its layers' names begin with nothing known"):
        back(tensors, ("transformer.h.0.a",))
