"""Errors keep what they say on their way through others' code."""

from __future__ import annotations

import pytest

from lora_plugins_sdk import LoraError


class Refuses:
    def __init__(self) -> None:
        raise LoraError("hidden_size=7", reason="is odd", cure="use an even one")


def test_megatron_raises_it_anew_with_the_module() -> None:
    """Its build_module calls the error's class with a text alone."""
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    with pytest.raises(LoraError, match="hidden_size=7: is odd -> use an even one when instantiating Refuses") as error:
        build_module(ModuleSpec(module=Refuses))
    assert [one.cure for one in error.value.diagnostics] == ["use an even one"]


def test_an_error_without_a_cure_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        LoraError("something", reason="is wrong")
