"""Options of experts, on a model that has none, are errors."""

import pytest
from sdk_toy import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import LoraConfig, LoraError, RunFacts, SelectedPlugin, derive_table


@pytest.mark.parametrize(
    ("facts", "lora", "words"),
    [
        (RunFacts(dp=2, ep=2), {}, "expert parallel size 2: has no effect"),
        (RunFacts(tp=2, etp=1), {}, "expert tensor parallel size 1: has no effect"),
        (RunFacts(), {"expert_sharing": "outer"}, "expert_sharing 'outer': has no effect"),
    ],
)
def test_they_are_named(facts: RunFacts, lora: dict[str, str], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        derive_table(SelectedPlugin.of(ARCHITECTURE), HF_CONFIG, LoraConfig(rank=2, **lora), facts)  # type: ignore[arg-type]
