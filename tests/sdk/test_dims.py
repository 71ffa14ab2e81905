"""Widths as expressions over a HF config."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins_sdk import LoraError, ModelDims, read_hf_config


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("hidden_size", 48),
        ("heads * head_dim", 40),
        ("(heads + 2) * 3 - 1", 29),
        ("hidden_size // heads", 6),
        ("7", 7),
    ],
)
def test_expressions_over_config_keys(expression: str, value: int) -> None:
    dims = ModelDims({"hidden_size": 48, "heads": 8, "head_dim": 5})
    assert dims.resolve(expression) == value


@given(a=st.integers(1, 500), b=st.integers(1, 500), c=st.integers(1, 50))
def test_expressions_are_python_integer_arithmetic(a: int, b: int, c: int) -> None:
    dims = ModelDims({"a": a, "b": b, "c": c})
    assert dims.resolve("a * b // c - (a + b)") == a * b // c - (a + b)


@pytest.mark.parametrize("config", [{"hidden_size": 64, "heads": 4}, {"hidden_size": 64, "heads": 4, "head_dim": None}])
def test_fallback_is_used_where_the_key_is_absent_or_null(config: dict) -> None:
    assert ModelDims(config, {"head_dim": "hidden_size // heads"}).resolve("head_dim") == 16


def test_an_explicit_key_wins_over_its_fallback() -> None:
    dims = ModelDims({"hidden_size": 64, "heads": 4, "head_dim": 32}, {"head_dim": "hidden_size // heads"})
    assert dims.resolve("heads * head_dim") == 128


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "missing"),
        ({"hidden_size": "64"}, "'64'"),
        ({"hidden_size": True}, "True"),
        ({"hidden_size": 6.0}, "6.0"),
    ],
)
def test_a_key_that_is_no_integer_is_an_error_that_names_it(config: dict, reason: str) -> None:
    with pytest.raises(LoraError, match=r"config key 'hidden_size'") as error:
        ModelDims(config).resolve("hidden_size")
    assert reason in str(error.value)


def test_a_misspelt_key_is_named_with_its_expression_and_a_near_match() -> None:
    with pytest.raises(LoraError) as error:
        ModelDims({"hidden_size": 4}).resolve("2 * hiden_size")
    assert "'hiden_size'" in str(error.value) and "'2 * hiden_size'" in str(error.value)
    assert "if 'hidden_size' is meant" in str(error.value)


@pytest.mark.parametrize(
    "expression", ["hidden_size / 2", "int(hidden_size)", "hidden_size ** 2", "1.5", "'a'", "True", "a b", ""]
)
def test_anything_else_than_integer_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(LoraError, match="not an integer expression"):
        ModelDims({"hidden_size": 4}).resolve(expression)


def test_flag_is_false_when_absent() -> None:
    assert ModelDims({"tied": True}).flag("tied") is True
    assert ModelDims({}).flag("tied") is False


def test_config_from_mapping_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy"}))
    for source in ({"model_type": "toy"}, tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert read_hf_config(source) == {"model_type": "toy"}


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "is not JSON"), ("[]", "no JSON object"), (None, "cannot be read")]
)
def test_unreadable_config_is_an_error_that_names_the_file(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(LoraError, match=reason) as error:
        read_hf_config(tmp_path / "config.json")
    assert "config.json" in str(error.value)
