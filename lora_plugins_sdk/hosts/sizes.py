"""Size rules of a dense GPT under tensor and pipeline parallelism. Needs no torch."""

from __future__ import annotations

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.run import RunFacts


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The smallest multiple of `tp` that holds `vocab_size` rows.

    The rows past `vocab_size` belong to no token: they are zero in the embedding and the output layer, and whoever
    turns logits into probabilities leaves their columns out.
    """
    return -(-vocab_size // tp) * tp


def dense_size_fields(dims: ModelDims) -> dict[str, int]:
    """Sizes of a dense transformer under megatron-core's names (TransformerConfig fields).

    Raises:
        LoraError: the config lacks one of them.
    """
    names = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
    }
    return {field: dims.resolve(name) for field, name in names.items()}


def dense_size_problems(facts: RunFacts, dims: ModelDims) -> list[Diagnostic]:
    """Sizes that the parallel run does not divide, each with the way out.

    Raises:
        LoraError: the config lacks one of the sizes.
    """
    rules = (
        ("num_attention_heads", facts.tp, "tensor", "every rank holds whole heads"),
        ("num_key_value_heads", facts.tp, "tensor", "kv heads are not replicated over ranks here"),
        ("intermediate_size", facts.tp, "tensor", "every rank holds an equal part of the MLP"),
        ("num_hidden_layers", facts.pp, "pipeline", "every stage holds the same number of layers"),
    )
    return [
        Diagnostic(
            subject=f"{name} = {dims.resolve(name)}",
            reason=f"not divisible by the {kind} parallel size {parts}, and {why}",
            cure=f"use a {kind} parallel size that divides {dims.resolve(name)}",
        )
        for name, parts, kind, why in rules
        if dims.resolve(name) % parts
    ]
