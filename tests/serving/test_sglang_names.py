"""The SGLang form of an adapter: names, whole groups, normalised targets, and what is refused (B26, B27, B28, B30)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora_plugins_sdk import LoraConfig, LoraError, RunFacts, derive_table, load_plugin
from lora_plugins_sdk.serving.sglang import ServingAdapter, for_sglang

RANK, HIDDEN, INNER, EXPERTS = 2, 12, 6, 3
PREFIX = "base_model.model.model."
HF: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 5,
}
HYBRID = HF | {
    "model_type": "qwen3_5_moe_text",
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 3,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 2,
}


def factors(**modules: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Tensor]:
    """PEFT tensors; module -> shapes of A and B, `__` for a dot."""
    torch.manual_seed(0)
    tensors = {}
    for module, (a, b) in modules.items():
        tensors[f"{PREFIX}{module.replace('__', '.')}.lora_A.weight"] = torch.randn(a)
        tensors[f"{PREFIX}{module.replace('__', '.')}.lora_B.weight"] = torch.randn(b)
    return tensors


def served(tensors: dict[str, Tensor], hf: dict[str, Any] = HF, **config: Any) -> ServingAdapter:
    return for_sglang(tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, **config}, hf)


def linear(out: int, width: int = HIDDEN) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (RANK, width), (out, RANK)


def product(adapter: ServingAdapter, module: str) -> Tensor:
    return adapter.tensors[f"{PREFIX}{module}.lora_B.weight"] @ adapter.tensors[f"{PREFIX}{module}.lora_A.weight"]


@pytest.mark.parametrize(
    ("architecture", "sharing"),
    [("qwen3", "none")] + [(name, one) for name in ("qwen3_moe", "qwen36_moe", "inkling") for one in ("none", "outer")],
)
def test_the_names_that_a_table_shows_are_those_of_the_tensors(architecture: str, sharing: str) -> None:
    plugin = load_plugin(architecture=architecture)
    hf = dict(plugin.architecture.tiny_config)
    lora = LoraConfig(rank=RANK, target_modules=("all-linear", "embed_tokens", "lm_head"), expert_sharing=sharing)
    tensors: dict[str, Tensor] = {}
    shown: list[str] = []
    for row in derive_table(plugin, hf, lora, RunFacts()).rows:
        value = torch.zeros(row.full_shape) if row.initially_zero else torch.randn(row.full_shape)
        tensors |= plugin.export_tensor(row, value)
        for name in row.serving_names.values():
            parts = [name.replace("{q,k,v}", part) for part in "qkv"] if "{q,k,v}" in name else [name]
            experts = range(row.full_shape[0]) if "{expert}" in name else [0]
            shown += [part.replace("{expert}", str(expert)) for part in parts for expert in experts]
    assert sorted(shown) == list(for_sglang(tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}, hf).tensors)


def test_dense_linears_keep_their_tensors_under_normalised_targets() -> None:
    tensors = factors(
        layers__0__self_attn__q_proj=linear(20),
        layers__0__self_attn__k_proj=linear(10),
        layers__0__self_attn__v_proj=linear(10),
        layers__1__self_attn__o_proj=linear(HIDDEN, 20),
        layers__1__mlp__gate_proj=linear(INNER),
        layers__1__mlp__up_proj=linear(INNER),
        layers__1__mlp__down_proj=linear(HIDDEN, INNER),
    )
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.randn(RANK, HIDDEN)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.randn(30, RANK)
    found = served(tensors)
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert found.config["target_modules"] == ["down_proj", "gate_up_proj", "lm_head", "o_proj", "qkv_proj"]
    assert (found.config["lora_alpha"], found.config["r"]) == (4, RANK)
    assert found.shared_outer_experts is None and found.left_out == ()


@pytest.mark.parametrize(
    ("only", "rows"),
    [("q_proj", {"k_proj": 10, "v_proj": 10}), ("k_proj", {"q_proj": 20, "v_proj": 10}), ("v_proj", {"q_proj": 20})],
)
def test_a_group_with_a_part_missing_is_filled_with_zeros(only: str, rows: dict[str, int]) -> None:
    """B28: SGLang joins q, k and v without looking."""
    width = 20 if only == "q_proj" else 10
    found = served(factors(**{f"layers__1__self_attn__{only}": linear(width)}))
    assert len(found.tensors) == 6
    for leaf, out in rows.items():
        b = found.tensors[f"{PREFIX}layers.1.self_attn.{leaf}.lora_B.weight"]
        assert tuple(b.shape) == (out, RANK) and not b.any()


def test_the_output_gate_doubles_the_rows_of_a_missing_q() -> None:
    """B28."""
    found = served(factors(layers__0__self_attn__v_proj=linear(10)), HYBRID)
    assert found.tensors[f"{PREFIX}layers.0.self_attn.q_proj.lora_B.weight"].shape == (40, RANK)


def test_up_alone_gets_a_gate_of_zeros() -> None:
    """B28."""
    found = served(factors(layers__0__mlp__up_proj=linear(INNER)))
    assert not product(found, "layers.0.mlp.gate_proj").any()
    assert product(found, "layers.0.mlp.up_proj").any()


def test_z_alone_gets_q_k_and_v_of_zeros() -> None:
    """B28: of a gated delta net, whose factors SGLang takes all or none."""
    found = served(factors(layers__0__linear_attn__in_proj_z=linear(8)), HYBRID)
    assert [len(product(found, f"layers.0.linear_attn.in_proj_{part}")) for part in "qkvz"] == [6, 6, 8, 8]
    assert not any(product(found, f"layers.0.linear_attn.in_proj_{part}").any() for part in "qkv")
    assert product(found, "layers.0.linear_attn.in_proj_z").any()


def test_gated_delta_net_is_split_by_rows_of_b() -> None:
    """B27: A for each of q, k and v, and the rows of B."""
    tensors = factors(layers__0__linear_attn__in_proj_qkv=linear(20), layers__0__linear_attn__out_proj=linear(12, 8))
    found = served(tensors, HYBRID)
    whole = (
        tensors[f"{PREFIX}layers.0.linear_attn.in_proj_qkv.lora_B.weight"]
        @ (tensors[f"{PREFIX}layers.0.linear_attn.in_proj_qkv.lora_A.weight"])
    )
    parts = [product(found, f"layers.0.linear_attn.in_proj_{part}") for part in "qkv"]
    assert [len(part) for part in parts] == [6, 6, 8]
    assert torch.equal(torch.cat(parts), whole)
    assert not product(found, "layers.0.linear_attn.in_proj_z").any()
    assert found.config["target_modules"] == ["in_proj_qkvz", "out_proj"]
    memory = [tensor.data_ptr() for tensor in found.tensors.values()]
    assert len(set(memory)) == len(memory)


def test_b_and_a_rows_are_left_out_while_they_are_zero_and_refused_else() -> None:
    """B26: never dropped in silence."""
    tensors = factors(layers__0__linear_attn__in_proj_z=linear(8), layers__0__linear_attn__in_proj_b=linear(4))
    with pytest.raises(LoraError, match=r"in_proj_b: SGLang serves no LoRA there"):
        served(tensors, HYBRID)
    tensors[f"{PREFIX}layers.0.linear_attn.in_proj_b.lora_B.weight"].zero_()
    found = served(tensors, HYBRID)
    assert found.left_out == ("model.layers.0.linear_attn.in_proj_b",)
    assert not any("in_proj_b" in name for name in found.tensors)


def test_experts_of_each_layout() -> None:
    """B30."""
    one = {f"layers__0__mlp__experts__{n}__gate_proj": linear(INNER) for n in range(EXPERTS)}
    assert served(factors(**one)).shared_outer_experts is False
    packed = {"layers__0__mlp__experts__gate_proj": ((EXPERTS, RANK, HIDDEN), (EXPERTS, INNER, RANK))}
    assert served(factors(**packed)).shared_outer_experts is False
    outer = {
        "layers__0__mlp__experts__gate_proj": ((1, RANK, HIDDEN), (EXPERTS, INNER, RANK)),
        "layers__0__mlp__experts__down_proj": ((EXPERTS, RANK, INNER), (1, HIDDEN, RANK)),
    }
    found = served(factors(**outer))
    assert found.shared_outer_experts is True
    up = f"{PREFIX}layers.0.mlp.experts.up_proj"
    assert found.tensors[f"{up}.lora_A.weight"].shape == (1, RANK, HIDDEN)
    assert found.tensors[f"{up}.lora_B.weight"].shape == (EXPERTS, INNER, RANK)
    with pytest.raises(LoraError, match="takes one layout"):
        served(factors(**outer, **{name.replace("0", "1", 1): shape for name, shape in packed.items()}))
    inner = {"layers__0__mlp__experts__gate_proj": ((EXPERTS, RANK, HIDDEN), (1, INNER, RANK))}
    with pytest.raises(LoraError, match="SGLang shares A of gate and up and B of down"):
        served(factors(**inner))


INKLING: dict[str, Any] = {
    "model_type": "inkling_mm_model",
    "text_config": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "swa_num_attention_heads": 3,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 4,
        "d_rel": 6,
    },
}


@pytest.mark.parametrize("kinds", [{"local_layer_ids": [1]}, {"layer_types": ["hybrid", "hybrid_sliding"]}])
def test_inkling_has_q_k_v_and_r_together(kinds: dict[str, Any]) -> None:
    """B28: what is missing has zeros, as many rows as its layer's kind has."""
    hf = {**INKLING, "text_config": INKLING["text_config"] | kinds}
    tensors = factors(
        layers__0__self_attn__r_proj=linear(24),
        layers__0__self_attn__o_proj=linear(HIDDEN, 20),
        layers__1__self_attn__q_proj=linear(12),
    )
    found = served(tensors, hf)
    assert found.config["target_modules"] == ["qkvr", "wo_ud"]
    rows = {
        (layer, leaf): found.tensors[f"{PREFIX}layers.{layer}.attn.{leaf}.lora_B.weight"].shape[0]
        for layer in range(2)
        for leaf in ("wq_du", "wk_dv", "wv_dv", "wr_du")
    }
    assert list(rows.values()) == [20, 10, 10, 24, 12, 12, 12, 18]
    assert product(found, "layers.0.attn.wr_du").any() and product(found, "layers.1.attn.wq_du").any()
    assert not any(product(found, f"layers.1.attn.{leaf}").any() for leaf in ("wk_dv", "wv_dv", "wr_du"))


SHARED = {
    "layers__0__mlp__shared_experts__up_proj": ((1, RANK, HIDDEN), (2, INNER, RANK)),
    "layers__0__mlp__shared_experts__down_proj": ((2, RANK, INNER), (1, HIDDEN, RANK)),
}


def test_shared_experts_have_the_layout_of_the_routed_ones() -> None:
    """B30: SGLang fills the first expert alone from a factor that is there once, without an error."""
    assert served(factors(**SHARED), INKLING).shared_outer_experts is True
    routed = {"layers__0__mlp__experts__0__up_proj": linear(INNER)}
    tensors = factors(**SHARED, **routed)
    found = served(tensors, INKLING)
    assert found.shared_outer_experts is False
    for leaf, factor in (("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")):
        name = f"{PREFIX}layers.0.mlp.shared_experts.{leaf}.lora_{factor}.weight"
        first, second = found.tensors[name]
        assert torch.equal(first, second)
        assert leaf == "gate_proj" or torch.equal(first, tensors[name][0])


def test_two_modules_that_are_one_to_sglang_are_refused() -> None:
    """One of the two would be dropped."""
    tensors = factors(layers__1__self_attn__q_proj=linear(20))
    twice = {name.replace("model.layers", "model.language_model.layers"): one for name, one in tensors.items()}
    assert twice.keys() != tensors.keys()
    with pytest.raises(LoraError, match=r"q_proj: and another module are both layers\.1\.self_attn\.q_proj"):
        served({**tensors, **twice})


def test_a_head_keeps_the_rows_of_tokens_alone() -> None:
    """B42: SGLang's head has no factors for the padding of the vocabulary, and would end at the first request."""
    hf = {**INKLING, "text_config": {**INKLING["text_config"], "vocab_size": 12, "unpadded_vocab_size": 9}}
    name = "base_model.model.lm_head.lora_B.weight"
    head = {"base_model.model.lm_head.lora_A.weight": torch.randn(RANK, HIDDEN), name: torch.randn(12, RANK)}
    with pytest.raises(LoraError, match=r"lm_head: has 12 rows of lora_B, and those beyond 9 are padding and not all"):
        served(head, hf)
    head[name][9:] = 0
    assert torch.equal(served(head, hf).tensors[name], head[name][:9])
    head[name] = head[name][:9]
    assert torch.equal(served(head, hf).tensors[name], head[name])


@pytest.mark.parametrize("tokens", [8, 10])
def test_an_embedding_and_a_head_of_another_vocabulary_are_refused(tokens: int) -> None:
    """SGLang compares the shapes at the first request, and ends."""
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    embedding = {f"{stem}A": torch.randn(RANK, tokens), f"{stem}B": torch.randn(HIDDEN, RANK)}
    stem = "base_model.model.lm_head.lora_"
    head = {f"{stem}A.weight": torch.randn(RANK, HIDDEN), f"{stem}B.weight": torch.randn(tokens, RANK)}
    with pytest.raises(LoraError) as told:
        served(embedding | head, HF | {"vocab_size": 9})
    assert f"embed_tokens: has {tokens} columns of lora_embedding_A, and the base has 9 tokens" in str(told.value)
    assert f"lm_head: has {tokens} rows of lora_B, and the base has 9 tokens" in str(told.value)
    served(embedding | head, HF | {"vocab_size": tokens})


def test_rslora_is_folded_into_alpha() -> None:
    """B34: SGLang divides alpha by the rank."""
    config = served(factors(layers__0__mlp__down_proj=linear(HIDDEN, INNER)), use_rslora=True).config
    assert config["lora_alpha"] / config["r"] == pytest.approx(4 / RANK**0.5)
    assert "use_rslora" not in config


@pytest.mark.parametrize(
    ("module", "shapes", "message"),
    [
        ("layers__0__mlp__gate", linear(EXPERTS), "SGLang serves embed_tokens and lm_head and, in the layers"),
        ("layers__0__mlp__shared_expert_gate", linear(1), "serves no LoRA there"),
        ("visual__layers__0__mlp__down_proj", linear(HIDDEN, INNER), "serves no LoRA there"),
        ("layers__7__mlp__down_proj", linear(HIDDEN, INNER), "the base has 2 layers"),
        ("layers__0__mlp__down_proj", ((INNER, RANK), (RANK, HIDDEN)), "export the adapter again with r=2"),
        ("layers__0__mlp__experts__gate_proj", linear(INNER), "SGLang takes .experts or 1, rank, in"),
        ("layers__0__linear_attn__in_proj_qkv", linear(19), "q, k and v together 20"),
    ],
)
def test_what_sglang_would_take_wrongly_is_refused(module: str, shapes: Any, message: str) -> None:
    """SGLang says success for some of these and dies at the first request."""
    with pytest.raises(LoraError, match=message):
        served(factors(**{module: shapes}), HYBRID)
