"""What a published config names differently than transformers does. Needs no torch."""

from __future__ import annotations

# Source: transformers' InklingTextConfig, which reads both. In a published config `intermediate_size` is the width of
# an expert, and the dense layers have a key of their own.
SPELLINGS: dict[str, dict[str, str]] = {
    "sconv_kernel_size": {"conv_kernel_size": "sconv_kernel_size"},
    "model_max_length": {"max_position_embeddings": "model_max_length"},
    "dense_intermediate_size": {
        "intermediate_size": "dense_intermediate_size",
        "moe_intermediate_size": "intermediate_size",
    },
}
