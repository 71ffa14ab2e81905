"""Runs that are refused while the parameter table is derived, without torch and without a model."""

from typing import Any

import pytest
from sdk_toy import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import LoraConfig, LoraError, RunFacts, SelectedPlugin, derive_table

PLUGIN = SelectedPlugin.of(ARCHITECTURE)


def derive(config: dict[str, Any] | None = None, rank: int = 2, facts: RunFacts | None = None) -> None:
    derive_table(PLUGIN, HF_CONFIG | (config or {}), LoraConfig(rank=rank), facts or RunFacts())


def test_the_largest_rank_that_fits() -> None:
    derive(rank=5)  # the vision patch is 5 wide


def test_a_rank_larger_than_a_dimension() -> None:
    with pytest.raises(LoraError, match=r"cannot adapt visual.patch_proj.*\s.*rank=6: larger.*use a rank of at most 5"):
        derive(rank=6)


@pytest.mark.parametrize(
    ("facts", "subject"),
    [
        (RunFacts(tp=4), "tensor parallel size 4"),
        (RunFacts(pp=4), "pipeline parallel size 4"),
    ],
)
def test_a_parallel_size_that_does_not_divide(facts: RunFacts, subject: str) -> None:
    with pytest.raises(LoraError) as error:
        derive(facts=facts)
    assert subject in {one.subject for one in error.value.diagnostics}


def test_everything_that_forbids_a_run_is_reported_at_once() -> None:
    with pytest.raises(LoraError) as error:
        derive(facts=RunFacts(tp=3, pp=3))
    text = str(error.value)
    assert "does not divide the 2 key/value heads" in text
    assert "does not divide a projection of 10 rows" in text
    assert "does not divide the model's 2 layers" in text


def test_a_config_of_another_model_type() -> None:
    with pytest.raises(LoraError, match="model_type 'llama': architecture 'toy' serves toy"):
        derive({"model_type": "llama"})


def test_a_config_without_a_needed_key() -> None:
    config = {key: value for key, value in HF_CONFIG.items() if key != "intermediate_size"}
    with pytest.raises(LoraError, match="config key 'intermediate_size': missing"):
        derive_table(PLUGIN, config, LoraConfig(rank=2), RunFacts())


def test_the_digest_knows_every_option() -> None:
    """Ranks compare digests: whatever changes the adapter must change the digest."""
    base = derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=2), RunFacts())
    same = derive_table(PLUGIN, dict(HF_CONFIG), LoraConfig(rank=2), RunFacts())
    assert same.digest() == base.digest()
    variants = [
        LoraConfig(rank=3),
        LoraConfig(rank=2, alpha=8),
        LoraConfig(rank=2, use_rslora=True),
        LoraConfig(rank=2, dropout=0.1),
        LoraConfig(rank=2, seed=1),
        LoraConfig(rank=2, exclude_modules=("o_proj",)),
        LoraConfig(rank=2, dtype="bfloat16"),
    ]
    digests = {derive_table(PLUGIN, HF_CONFIG, lora, RunFacts()).digest() for lora in variants}
    digests |= {derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=2), RunFacts(tp=2)).digest()}
    assert len(digests | {base.digest()}) == len(variants) + 2
