"""Inkling: its sites and the rest of its base, as data."""

from __future__ import annotations

from lora_plugins_sdk import Architecture, Concat, Projection, Site, SiteKind

ARCHITECTURE = Architecture(
    name="inkling",
    model_types=("inkling_text",),
    fallbacks={"unpadded_vocab_size": "vocab_size"},
    sites=(
        Site(
            path="output_layer",
            kind=SiteKind.COLUMN,
            pack=Concat(pad=True),
            projections=(Projection(hf="lm_head", in_dim="hidden_size", out_dim="unpadded_vocab_size"),),
            all_linear=False,
        ),
    ),
)
