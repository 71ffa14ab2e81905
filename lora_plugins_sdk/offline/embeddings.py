"""Whether a pair's factors are of its module's kind. Of a square weight the shapes do not tell: an embedding's product
is added transposed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from lora_plugins_sdk.errors import Diagnostic, LoraError
from lora_plugins_sdk.selection import load_plugin
from lora_plugins_sdk.targets import candidates

# What transformers' models call their lookup of token ids.
_NAMES = frozenset(
    {"embed_in", "embed_tokens", "shared", "tok_embeddings", "token_embedding", "word_embeddings", "wte"}
)
_SURELY_LINEAR = re.compile(r".+\.\d+\..+|(.+\.)?lm_head")


def declared_embeddings(hf_config: Mapping[str, Any]) -> frozenset[str]:
    """HF modules that the plugin of a base declares as embeddings; none without a plugin, or where it has none."""
    try:
        architecture = load_plugin(str(hf_config.get("model_type"))).architecture
        return frozenset(one.hf for one in candidates(architecture, hf_config) if one.site.embedding)
    except LoraError:
        return frozenset()


def other_kind(
    module: str, config: Mapping[str, Any], *, embedding: bool, declared: Collection[str] | None = None
) -> Diagnostic | None:
    """A problem when the factors of an embedding are beside a linear, or those of a linear beside an embedding.

    Args:
        module: HF module of the pair.
        config: `adapter_config.json`. PEFT's `target_parameters` have a linear's factors, whatever holds the parameter.
        embedding: whether the factors are `lora_embedding_A` and `_B`.
        declared: see `declared_embeddings`; None while the base is not known. Only what a name tells is then refused.
    """
    surely_linear = _SURELY_LINEAR.fullmatch(module) is not None
    looks_up = module in (declared or ()) or (module.rsplit(".", 1)[-1] in _NAMES and not surely_linear)
    if embedding and not looks_up and (declared is not None or surely_linear):
        return Diagnostic(
            subject=module,
            reason="is no embedding, and has lora_embedding_A and lora_embedding_B, whose product is added transposed",
            cure="name the factors of a linear lora_A.weight [rank, in] and lora_B.weight [out, rank]",
        )
    targets = config.get("target_parameters")
    parameters = [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []
    by_parameter = any(f".{module}.weight".endswith(f".{one}") for one in parameters)
    if not embedding and looks_up and not by_parameter:
        return Diagnostic(
            subject=module,
            reason="is an embedding, and has lora_A.weight and lora_B.weight, which PEFT loads beside a linear only",
            cure="name them lora_embedding_A [rank, vocabulary] and lora_embedding_B [hidden, rank]",
        )
    return None
