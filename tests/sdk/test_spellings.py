"""A config whose keys have other names, and one that says two things."""

from dataclasses import replace
from typing import Any

import pytest
from sdk_toy import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import LoraError, Multimodal

SPELLED = replace(
    ARCHITECTURE,
    multimodal=Multimodal(),
    spellings={
        "d_model": {"hidden_size": "d_model"},
        "wide_size": {"intermediate_size": "wide_size", "narrow_size": "intermediate_size"},
    },
)


def sizes(**changes: Any) -> list[int | str]:
    config = {key: value for key, value in (HF_CONFIG | changes).items() if value != "left out"}
    dims = SPELLED.dims(config)
    return [dims.resolve(key) for key in ("hidden_size", "intermediate_size", "narrow_size")]


@pytest.mark.parametrize(
    "changes",
    [
        {"narrow_size": 4},
        {"hidden_size": "left out", "d_model": 12, "narrow_size": 4},
        {"d_model": 12, "narrow_size": 4},
        {"intermediate_size": 4, "wide_size": 10},
        {"intermediate_size": 4, "wide_size": 10, "narrow_size": 4},
        {"narrow_size": 4, "d_model": None, "wide_size": None},
    ],
    ids=["declared", "renamed", "both", "another-meaning", "another-meaning-and-declared", "null"],
)
def test_every_spelling_is_the_same_model(changes: dict[str, Any]) -> None:
    assert sizes(**changes) == [12, 10, 4]


def test_contradictions_are_listed_together() -> None:
    with pytest.raises(LoraError) as error:
        sizes(d_model=8, wide_size=10, intermediate_size=4, narrow_size=5)
    assert [one.subject for one in error.value.diagnostics] == [
        "config keys 'hidden_size' and 'd_model'",
        "config keys 'narrow_size' and 'intermediate_size'",
    ]
    assert "say 12 and 8" in str(error.value)


def test_a_wrapped_config_need_not_name_the_model_type_twice() -> None:
    text = {key: value for key, value in HF_CONFIG.items() if key != "model_type"} | {"d_model": 12}
    assert SPELLED.dims({"model_type": "toy", "text_config": text}).resolve("hidden_size") == 12
    with pytest.raises(LoraError, match="model_type 'other'"):
        SPELLED.dims({"model_type": "toy", "text_config": text | {"model_type": "other"}})
    with pytest.raises(LoraError, match="model_type None"):
        SPELLED.dims({"text_config": text})
