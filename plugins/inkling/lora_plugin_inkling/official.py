"""The schema in which Inkling's adapters are published."""

from __future__ import annotations

from lora_plugins_sdk import AdapterSchema

OFFICIAL = AdapterSchema(
    name="official",
    prefix="model.llm.",
    wrappers=("model", "llm", "language_model"),
    parts={
        "attn": "self_attn",
        "wq_du": "q_proj",
        "wk_dv": "k_proj",
        "wv_dv": "v_proj",
        "wr_du": "r_proj",
        "wo_ud": "o_proj",
        "w1": "gate_proj",
        "w3": "up_proj",
        "w2": "down_proj",
        "embed_tokens": "embed_tokens",
        "embed": "embed_tokens",
        "lm_head": "lm_head",
        "unembed": "lm_head",
    },
)
