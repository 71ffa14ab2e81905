"""A plugin's view of a checkpoint whose files are not as the architecture declares."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sdk_toy import HF_CONFIG
from sdk_toy_host import hf_weights, toy_model, toy_plugin
from torch import Tensor

from lora_plugins_sdk import BaseCheckpoint, BaseTensors, LoraError, hookimpl, load_base_weights

OLD, NEW = "transformer.", "model."


class Renamed:
    """Files that say `transformer.` where `model.` is declared, and keep every tensor negated."""

    def __init__(self, stored: BaseTensors) -> None:
        self.stored = stored

    def names(self) -> set[str]:
        return {name.replace(OLD, NEW) for name in self.stored.names()}

    def has(self, name: str) -> bool:
        return name in self.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(name.replace(NEW, OLD))

    def part(self, name: str, *index: int | slice) -> Tensor:
        return -self.stored.part(name.replace(NEW, OLD), *index)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.part(name, slice(start, stop))

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        return self.part(name, slice(None), slice(start, stop))


class Plugin:
    @hookimpl
    def lora_base_tensors(self, stored: BaseTensors) -> BaseTensors | None:
        return Renamed(stored) if any(name.startswith(OLD) for name in stored.names()) else None


def _directory(place: Path) -> Path:
    tensors = {name.replace(NEW, OLD): -tensor for name, tensor in hf_weights(toy_model()).items()}
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(HF_CONFIG))
    return place


def test_weights_are_read_through_the_view(tmp_path: Path) -> None:
    model, expected = toy_model(), toy_model()
    for parameter in model.parameters():
        parameter.data.fill_(-7)
    load_base_weights(model, toy_plugin(Plugin()), _directory(tmp_path))
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_a_base_is_published_as_transformers_writes_it_unless_the_plugin_knows_better() -> None:
    class Publisher:
        @hookimpl
        def lora_published_base(self, base: BaseCheckpoint) -> BaseCheckpoint:
            tensors = {name.replace(NEW, OLD): tensor for name, tensor in base.tensors.items()}
            return BaseCheckpoint(config={**base.config, "published": True}, tensors=tensors)

    base = BaseCheckpoint(config=HF_CONFIG, tensors=hf_weights(toy_model()))
    assert toy_plugin().published_base(base) is base
    published = toy_plugin(Publisher()).published_base(base)
    assert published.config == {**HF_CONFIG, "published": True}
    assert set(published.tensors) == {name.replace(NEW, OLD) for name in base.tensors}


def test_without_the_view_they_have_no_place(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match=r"transformer\.embed_tokens\.weight: is in the checkpoint and has no place"):
        load_base_weights(toy_model(), toy_plugin(), _directory(tmp_path))
