"""What a published config names differently than transformers does, and the configs of other models. Needs no torch."""

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

_INKLING_2 = (
    "it is another architecture: attention residuals between blocks of layers, attention sinks and output gates, "
    "clipped queries and keys, convolutions whose taps depend on the token, soft caps in the experts and on the logits"
)
# Model types that one might take for Inkling's -> why they are not served.
_INKLING_2_TYPES = ("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text")
REFUSED: dict[str, str] = dict.fromkeys(_INKLING_2_TYPES, _INKLING_2)
