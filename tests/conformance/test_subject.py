"""What an author may say of the adapter that the kit attaches."""

import pytest

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.testing.conformance import Subject


def test_alpha_follows_the_rank_unless_it_is_given() -> None:
    alphas = [Subject.of("qwen3").lora().alpha, Subject.of("qwen3", rank=6).lora().alpha]
    assert [*alphas, Subject.of("qwen3", alpha=5.0).lora().alpha] == [12, 9, 5]


def test_an_option_that_is_none() -> None:
    with pytest.raises(LoraError, match=r"option 'alhpa' of the conformance kit: is unknown -> use rank, alpha, "):
        Subject.of("qwen3", alhpa=5.0)


def test_a_plugin_that_is_wrong_without_options_is_left_to_the_checks(wrong_plugin) -> None:
    Subject.of("qwen3", plugin=str(wrong_plugin)).refuse_options()
    with pytest.raises(LoraError, match="use a rank of at most"):
        Subject.of("qwen3", rank=512).refuse_options()
