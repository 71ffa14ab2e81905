"""LoraConfig: scale, and every value out of range is one error that names it."""

import math
from typing import Any

import pytest

from lora_plugins_sdk import LoraConfig, LoraError


def test_scale() -> None:
    assert LoraConfig(rank=16, alpha=32).scale == 2.0
    assert LoraConfig(rank=16, alpha=32, use_rslora=True).scale == 8.0


def test_rslora_scales_with_the_square_root_of_the_rank() -> None:
    """B34: alpha/r in place of alpha/sqrt(r) is too weak by sqrt(r)."""
    plain, stabilised = LoraConfig(rank=64, alpha=16), LoraConfig(rank=64, alpha=16, use_rslora=True)
    assert stabilised.scale / plain.scale == pytest.approx(math.sqrt(64))


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": -4}, "rank=-4"),
        ({"rank": 2.0}, "rank=2.0"),
        ({"rank": True}, "rank=True"),
        ({"alpha": 0}, "alpha=0"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"alpha": "32"}, "alpha='32'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"dropout": "none"}, "dropout='none'"),
        ({"use_rslora": "no"}, "use_rslora='no'"),
        ({"seed": None}, "seed=None"),
        ({"target_modules": ()}, "target_modules"),
        ({"target_modules": ("q_proj", 3)}, "target_modules: 3"),
        ({"exclude_modules": None}, "exclude_modules: None"),
        ({"target_modules": ("",)}, "target_modules: ''"),
        ({"scope": "audio"}, "scope='audio'"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_a_value_out_of_range_is_one_error_that_names_it(options: dict[str, Any], subject: str) -> None:
    with pytest.raises(LoraError) as error:
        LoraConfig(**options)
    assert [one.subject for one in error.value.diagnostics] == [subject]
    assert error.value.diagnostics[0].cure


def test_all_bad_values_are_reported_at_once() -> None:
    with pytest.raises(LoraError) as error:
        LoraConfig(rank=0, alpha=-1, dropout=2, scope="x", dtype="y")
    assert len(error.value.diagnostics) == 5


def test_targets_become_tuples() -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], exclude_modules="lm_head")  # type: ignore[arg-type]
    assert config.target_modules == ("q_proj", "v_proj")
    assert config.exclude_modules == ("lm_head",)
    assert hash(config) == hash(LoraConfig(target_modules=("q_proj", "v_proj"), exclude_modules=("lm_head",)))
