"""How PEFT names the tensors of an adapter file. Needs no torch."""

from __future__ import annotations

import re

PEFT_PREFIX = "base_model.model."
"""What PEFT's wrappers put before a module path."""

FACTOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(?(embedding)|\.weight)"
)
"""A factor's name: `lora_A.weight` beside a linear, `lora_embedding_A` alone beside an embedding."""


def factor_name(module: str, factor: str, *, embedding: bool = False) -> str:
    """The name of one factor, for example `base_model.model.lm_head.lora_A.weight`.

    Args:
        module: HF module path.
        factor: `"A"` or `"B"`.
        embedding: whether the module is an embedding.
    """
    return f"{PEFT_PREFIX}{module}.lora_" + (f"embedding_{factor}" if embedding else f"{factor}.weight")
