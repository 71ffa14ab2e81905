"""Together the pipeline stages hold each layer once."""

from __future__ import annotations

import pytest

from known_faults.stack_host import ARCHITECTURE, HF_CONFIG, LORA
from lora_plugins_sdk import LoraError, RunFacts, SelectedPlugin, derive_table
from lora_plugins_sdk.agreement import claim_of, place_on_stages

PLUGIN = SelectedPlugin.of(ARCHITECTURE)
TABLE = derive_table(PLUGIN, HF_CONFIG, LORA, RunFacts(pp=3))


def _layer(number: int) -> str:
    return f"decoder.layers.{number}.linear_q_down_proj"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (((0,), (1,), ()), r"layers.2.linear_q_down_proj: is on no pipeline stage"),
        (((0, 1), (1,), (2,)), r"layers.1.linear_q_down_proj: is on several pipeline stages"),
        (((0,), (0,), (0,)), r"layers.1.linear_q_down_proj and 1 more: is on no pipeline stage"),
    ],
    ids=["lost", "twice", "all-count-from-zero"],
)
def test_a_layer_on_no_stage_or_on_two_is_refused(layers: tuple[tuple[int, ...], ...], message: str) -> None:
    """B22: an export that took one stage for the whole model was saved and loaded without a word."""
    stages = [claim_of(PLUGIN, TABLE, [_layer(number) for number in here]) for here in layers]
    with pytest.raises(LoraError, match=message):
        place_on_stages(TABLE, stages)


def test_each_layer_on_its_stage() -> None:
    """B22: what export gathers by."""
    stages = [claim_of(PLUGIN, TABLE, [_layer(number)]) for number in (2, 0, 1)]
    assert place_on_stages(TABLE, stages) == {_layer(2): 0, _layer(0): 1, _layer(1): 2}
