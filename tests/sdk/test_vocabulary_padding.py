"""What a host with other padding is told."""

from __future__ import annotations

import pytest

from lora_plugins_sdk import Concat, QueryGroups, RunFacts
from lora_plugins_sdk.hosts.sizes import padded_vocab_size
from lora_plugins_sdk.pack import pads
from lora_plugins_sdk.vocabulary_padding import padding_cure


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("number", [1, 2, 64, 128, 300])
def test_the_number_that_is_named_gives_the_hosts_rows(tp: int, number: int) -> None:
    rows = padded_vocab_size(301, RunFacts(tp=tp, make_vocab_size_divisible_by=number)) // tp
    cure = padding_cure(rows, 301, RunFacts(tp=tp, make_vocab_size_divisible_by=7))
    named = int(cure.rsplit("=", 1)[1].removesuffix(")"))
    assert padded_vocab_size(301, RunFacts(tp=tp, make_vocab_size_divisible_by=named)) == rows * tp
    assert named <= 128 or number > 128, "a usual number where one does it"


def test_a_host_for_fewer_tokens_is_no_matter_of_padding() -> None:
    """Megatron-LM pads the tokenizer's size, which may be less than the config's."""
    cure = padding_cure(128, 301, RunFacts(tp=2))
    assert "all 301 tokens" in cure and "--vocab-size" in cure and "divisible_by" not in cure


def test_only_a_vocabulary_is_padded() -> None:
    assert pads(Concat(pad=True)) and not any(pads(one) for one in (Concat(), QueryGroups(), None))
