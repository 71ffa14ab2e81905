"""Faults in what only Qwen3-MoE has: dense layers between those with experts, and weights that add up to one or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from lora_plugins_sdk import peft_parameters
from mutants.mutant import seeded
from mutants.seams import wrapped

moe = partial(seeded, subject="qwen3-moe")


@moe("base", imitates="SGLang's own Qwen3-MoE", words="layers.0.mlp.router")
def dense_layers_get_experts() -> Iterator[None]:
    """The host has experts in the layers that the config takes out."""
    with _built(lambda fields: {"moe_layer_freq": [1] * len(fields["moe_layer_freq"])}):
        yield


@moe("base", imitates="the other kind of layer", words="layers.1.mlp.linear_fc1")
def dense_and_sparse_layers_exchanged() -> Iterator[None]:
    """The host has experts where the config has none, and none where it has some."""
    with _built(lambda fields: {"moe_layer_freq": [1 - one for one in fields["moe_layer_freq"]]}):
        yield


@moe("base", imitates="norm_topk_prob left out", words="base logits")
def weights_of_chosen_experts_not_normalised() -> Iterator[None]:
    """The host weighs experts by the softmax over all of them."""
    with _built(lambda fields: {"moe_router_pre_softmax": True}):
        yield


@moe("peft", here=True, imitates="B31", site="decoder.layers.[03].mlp.linear_fc?", words="PEFT holds no")
def dense_linears_named_as_modules() -> Iterator[None]:
    """PEFT is given the dense layers' linears by their names, which it takes for the experts'."""
    with patch.object(peft_parameters, "_by_weight", lambda projection: projection.by_weight):
        yield


def _built(change: Any) -> AbstractContextManager[Any]:
    """The host built from other fields than the plugin reads from the config."""
    from lora_plugin_qwen3_moe import model

    def other(right: Any, run: Any, *, model: Any, **rest: Any) -> Any:
        return right(run, model={**model, **change(model)}, **rest)

    return wrapped(model, "transformer_config", other)
