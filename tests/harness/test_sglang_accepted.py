"""Which modules SGLang takes factors for and in which shapes: the whole list that was measured with SGLang 0.5.23."""

from __future__ import annotations

import pytest

from lora_harness.engines.sglang.sync.accepted import EXPERTS, LINEARS, Factors, accepted_factors
from lora_harness.engines.sglang.sync.base_shapes import BaseShapes, Shape

# Rank, hidden size, inner size, vocabulary, experts, shared experts.
R, H, F, V, E, N = 4, 32, 48, 60, 8, 2
DENSE: dict[str, Shape] = {
    "self_attn.q_proj": (64, H),
    "self_attn.k_proj": (16, H),
    "self_attn.v_proj": (16, H),
    "self_attn.o_proj": (H, 64),
    "mlp.gate_proj": (F, H),
    "mlp.up_proj": (F, H),
    "mlp.down_proj": (H, F),
}
GDN: dict[str, Shape] = {
    "linear_attn.in_proj_qkv": (2 * 24 + 40, H),
    "linear_attn.in_proj_z": (40, H),
    "linear_attn.out_proj": (H, 40),
    "mlp.experts.gate_up_proj": (E, 2 * F, H),
    "mlp.experts.down_proj": (E, H, F),
    "mlp.shared_expert.gate_proj": (F, H),
    "mlp.shared_expert.up_proj": (F, H),
    "mlp.shared_expert.down_proj": (H, F),
}
ONE_BY_ONE: dict[str, Shape] = {
    f"mlp.experts.{expert}.{leaf}_proj": (H, F) if leaf == "down" else (F, H)
    for expert in range(E)
    for leaf in ("gate", "up", "down")
}
INKLING: dict[str, Shape] = {
    "attn.wq_du": (64, H),
    "attn.wk_dv": (16, H),
    "attn.wv_dv": (16, H),
    "attn.wr_du": (8, H),
    "attn.wo_ud": (H, 64),
    "mlp.experts.w13_weight": (E, 2 * F, H),
    "mlp.experts.w2_weight": (E, H, F),
    "mlp.shared_experts.shared_w13_weight": (N, 2 * F, H),
    "mlp.shared_experts.shared_w2_weight": (N, H, F),
}
INKLING_DENSE: dict[str, Shape] = {"mlp.w13_dn": (2 * F, H), "mlp.w2_md": (H, F)}
BASE = BaseShapes(
    layers={0: DENSE, 1: GDN, 2: ONE_BY_ONE, 3: INKLING, 4: INKLING_DENSE},
    outside={"lm_head": (V, H), "embed_tokens": (V, H)},
)
CONFIG = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
}

# Layer, module, shared outer experts, A, B.
ACCEPTED: list[tuple[int, str, bool, Shape, Shape]] = [
    (0, "self_attn.q_proj", False, (R, H), (64, R)),
    (0, "self_attn.k_proj", False, (R, H), (16, R)),
    (0, "self_attn.v_proj", False, (R, H), (16, R)),
    (0, "self_attn.qkv_proj", False, (R, H), (96, R)),
    (0, "self_attn.o_proj", False, (R, 64), (H, R)),
    (0, "mlp.gate_proj", False, (R, H), (F, R)),
    (0, "mlp.up_proj", False, (R, H), (F, R)),
    (0, "mlp.gate_up_proj", False, (R, H), (2 * F, R)),
    (0, "mlp.down_proj", False, (R, F), (H, R)),
    (1, "mlp.shared_expert.gate_proj", False, (R, H), (F, R)),
    (1, "mlp.shared_expert.up_proj", False, (R, H), (F, R)),
    (1, "mlp.shared_expert.gate_up_proj", False, (R, H), (2 * F, R)),
    (1, "mlp.shared_expert.down_proj", False, (R, F), (H, R)),
    (1, "linear_attn.in_proj_qkvz", False, (R, H), (128, R)),
    (1, "linear_attn.in_proj_q", False, (R, H), (24, R)),
    (1, "linear_attn.in_proj_k", False, (R, H), (24, R)),
    (1, "linear_attn.in_proj_v", False, (R, H), (40, R)),
    (1, "linear_attn.in_proj_z", False, (R, H), (40, R)),
    (1, "linear_attn.out_proj", False, (R, 40), (H, R)),
    (1, "mlp.experts.3.gate_proj", False, (R, H), (F, R)),
    (1, "mlp.experts.3.gate_up_proj", False, (R, H), (2 * F, R)),
    (1, "mlp.experts.3.down_proj", False, (R, F), (H, R)),
    (1, "mlp.experts.gate_proj", False, (E, R, H), (E, F, R)),
    (1, "mlp.experts.gate_up_proj", False, (E, R, H), (E, 2 * F, R)),
    (1, "mlp.experts.down_proj", False, (E, R, F), (E, H, R)),
    (1, "mlp.experts.up_proj", True, (1, R, H), (E, F, R)),
    (1, "mlp.experts.gate_up_proj", True, (1, R, H), (E, 2 * F, R)),
    (1, "mlp.experts.down_proj", True, (E, R, F), (1, H, R)),
    (2, "mlp.experts.7.up_proj", False, (R, H), (F, R)),
    (2, "mlp.experts.gate_up_proj", False, (E, R, H), (E, 2 * F, R)),
    (2, "mlp.experts.down_proj", True, (E, R, F), (1, H, R)),
    (3, "attn.wq_du", False, (R, H), (64, R)),
    (3, "attn.wk_dv", False, (R, H), (16, R)),
    (3, "attn.wv_dv", False, (R, H), (16, R)),
    (3, "attn.wr_du", False, (R, H), (8, R)),
    (3, "attn.qkvr", False, (R, H), (104, R)),
    (3, "attn.wo_ud", False, (R, 64), (H, R)),
    (3, "mlp.experts.gate_proj", True, (1, R, H), (E, F, R)),
    (3, "mlp.experts.down_proj", True, (E, R, F), (1, H, R)),
    (3, "mlp.experts.w3", True, (1, R, H), (E, F, R)),
    (3, "mlp.shared_experts.gate_proj", True, (1, R, H), (N, F, R)),
    (3, "mlp.shared_experts.w1", False, (N, R, H), (N, F, R)),
    (3, "mlp.shared_experts.w2", False, (N, R, F), (N, H, R)),
    (3, "mlp.shared_experts.up_proj", True, (1, R, H), (N, F, R)),
    (3, "mlp.shared_experts.gate_up_proj", True, (1, R, H), (N, 2 * F, R)),
    (3, "mlp.shared_experts.w2", True, (N, R, F), (1, H, R)),
    (4, "mlp.w1", False, (R, H), (F, R)),
    (4, "mlp.up_proj", False, (R, H), (F, R)),
    (4, "mlp.gate_up_proj", False, (R, H), (2 * F, R)),
    (4, "mlp.w2", False, (R, F), (H, R)),
]
REFUSED = [
    (0, "linear_attn.out_proj", False, "would leave the factor out"),
    (1, "self_attn.q_proj", False, "would leave the factor out"),
    (0, "mlp.experts.gate_proj", False, "would leave the factor out"),
    (9, "self_attn.q_proj", False, "no layer 9"),
    (1, "linear_attn.in_proj_qkv", False, "no LoRA for this module"),
    (1, "linear_attn.in_proj_ba", False, "no LoRA for this module"),
    (1, "mlp.gate", False, "no LoRA for this module"),
    (1, "mlp.shared_expert_gate", False, "no LoRA for this module"),
    (1, "linear_attn.conv1d", False, "no LoRA for this module"),
    (1, "mlp.experts.8.up_proj", False, "has 8 experts"),
    (1, "mlp.experts.3.up_proj", True, "this expert has its own"),
]


def asked(module: str, shared: bool = False) -> Factors | str:
    return accepted_factors(module, BASE, CONFIG, rank=R, shared_outer=shared)


@pytest.mark.parametrize(("layer", "path", "shared", "a", "b"), ACCEPTED, ids=lambda value: str(value))
def test_shapes_of_what_is_accepted(layer: int, path: str, shared: bool, a: Shape, b: Shape) -> None:
    found = asked(f"base_model.model.model.layers.{layer}.{path}", shared)
    assert isinstance(found, Factors), found
    assert (found.a, found.b) == (a, b)


@pytest.mark.parametrize(("layer", "path", "shared", "reason"), REFUSED, ids=lambda value: str(value))
def test_reasons_of_what_is_refused(layer: int, path: str, shared: bool, reason: str) -> None:
    """B26: what SGLang drops with a warning, or dies of, is refused by name."""
    found = asked(f"model.layers.{layer}.{path}", shared)
    assert isinstance(found, str) and reason in found


def test_head_and_embedding() -> None:
    head, embedding = asked("base_model.model.lm_head"), asked("base_model.model.model.embed_tokens")
    assert isinstance(head, Factors) and isinstance(embedding, Factors)
    assert (head.a, head.b) == ((R, H), (V, R))
    assert (embedding.a, embedding.b) == ((R, V), (H, R))


def test_a_head_has_no_factors_for_the_padding_of_its_vocabulary() -> None:
    found = accepted_factors("lm_head", BASE, {"unpadded_vocab_size": V - 3}, rank=R, shared_outer=False)
    assert isinstance(found, Factors) and (found.a, found.b) == ((R, H), (V - 3, R))


def test_every_row_of_the_table_is_here() -> None:
    tested = {path for _, path, _, _, _ in ACCEPTED}
    assert tested >= LINEARS.keys()
    published = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for bank, leaves in EXPERTS.items():
        ours = {path.rsplit(".", 1)[-1] for path in tested if f".{bank}." in path}
        assert {published.get(leaf, leaf) for leaf in ours} == leaves.keys()
