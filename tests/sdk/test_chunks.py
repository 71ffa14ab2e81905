"""Virtual pipeline chunks: one rank holds several modules, each with a part of the layers."""

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import randomize, toy_inputs, toy_model, toy_plugin
from torch import nn

from lora_plugins_sdk import LoraConfig, LoraError, adapter_of, attach, detach, export_adapter

LORA = LoraConfig(rank=2, alpha=4, target_modules=("all-linear", "lm_head"))


def chunks() -> tuple[nn.Module, nn.Module]:
    """The toy model as two chunks; like megatron-core's, its layers know their numbers, from 1."""
    model = toy_model()
    for number, layer in enumerate(model.decoder.layers, start=1):
        layer.layer_number = number  # type: ignore[assignment]
    first, last = nn.Module(), nn.Module()
    for chunk, layer in ((first, model.decoder.layers[0]), (last, model.decoder.layers[1])):
        chunk.decoder = nn.Module()
        chunk.decoder.layers = nn.ModuleList([layer])
    first.embedding, first.vision = model.embedding, model.vision
    last.output_layer = model.output_layer
    return first, last


def test_an_adapter_over_chunks_is_that_of_the_whole_model() -> None:
    """B22: both chunks call their only layer number 0."""
    whole, parts = toy_model(), chunks()
    attach(whole, toy_plugin(), HF_CONFIG, LORA)
    adapter = attach(parts, toy_plugin(), HF_CONFIG, LORA)
    assert adapter_of(parts[0]) is adapter_of(parts[1]) is adapter
    randomize(whole)
    for (name, mine), (other, expected) in zip(
        adapter.named_parameters(), adapter_of(whole).named_parameters(), strict=True
    ):
        assert name == other
        mine.data.copy_(expected)
    tokens, patches = toy_inputs()
    first, last = parts
    x = first.embedding(tokens) + first.vision.patch_linear(patches)[0]  # type: ignore[operator, union-attr]
    for chunk in parts:
        x = chunk.decoder.layers[0](x)  # type: ignore[index, operator, union-attr]
    assert torch.equal(last.output_layer(x)[0], whole(tokens, patches))  # type: ignore[operator]
    exported = export_adapter(parts).tensors
    for name, tensor in export_adapter(whole).tensors.items():
        assert torch.equal(exported[name], tensor)
    detach(last)
    with pytest.raises(LoraError, match="has no adapter attached"):
        adapter_of(first)


def test_a_chunk_that_was_left_out_is_an_error() -> None:
    """B22: an adapter for one chunk of two would look complete on this rank."""
    with pytest.raises(LoraError, match=r"decoder.layers.1.*pass every model chunk of this rank"):
        attach(chunks()[0], toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
