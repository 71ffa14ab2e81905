"""Initial values depend on the seed and the HF name, never on the topology."""

import math

import pytest
import torch
from sdk_toy import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import LoraConfig, ParallelRun, ParamRow, RunFacts, SelectedPlugin, derive_table
from lora_plugins_sdk.init import full_initial_factor, initial_factor

PLUGIN = SelectedPlugin.of(ARCHITECTURE)
WIDE = HF_CONFIG | {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 4, "patch_size": 64}
TARGETS = ("all-linear", "lm_head")


def rank_of(facts: RunFacts, tp_rank: int) -> ParallelRun:
    return ParallelRun(facts=facts, tp_rank=tp_rank)


def rows(facts: RunFacts, config: dict = HF_CONFIG, **options: object) -> tuple[ParamRow, ...]:
    lora = LoraConfig(rank=4, target_modules=TARGETS, **options)  # type: ignore[arg-type]
    return derive_table(PLUGIN, config, lora, facts).rows


def test_b_is_zero_and_a_is_not() -> None:
    for row in rows(RunFacts()):
        value = full_initial_factor(row, seed=0)
        assert value.shape == row.full_shape
        assert bool((value == 0).all()) is (row.factor == "B")


def test_a_has_the_spread_of_the_full_fan_in() -> None:
    """B10: with a local fan-in the standard deviation would grow with TP."""
    for facts in (RunFacts(), RunFacts(tp=2)):
        for row in rows(facts, WIDE):
            if row.factor == "A":
                local = initial_factor(row, 0, rank_of(facts, facts.tp - 1))
                expected = 1 / math.sqrt(3 * row.full_shape[1])
                assert local.std().item() == pytest.approx(expected, rel=0.12), row.init_key
                assert local.abs().max().item() <= 1 / math.sqrt(row.full_shape[1])


@pytest.mark.parametrize("facts", [RunFacts(tp=2), RunFacts(tp=2, sequence_parallel=True)], ids=["tp", "sp"])
def test_shards_put_together_are_the_one_process_factor(facts: RunFacts) -> None:
    for row, whole in zip(rows(facts), rows(RunFacts()), strict=True):
        parts = [initial_factor(row, 0, rank_of(facts, rank)) for rank in range(2)]
        assert all(part.shape == row.local_shape for part in parts)
        full = full_initial_factor(whole, seed=0)
        if row.partition_dim == -1:
            assert torch.equal(parts[0], full) and torch.equal(parts[1], full)
        else:
            assert torch.equal(torch.cat(parts, dim=row.partition_dim)[: full.shape[0]], full)


def test_shards_of_a_row_parallel_a_differ() -> None:
    """B11: one random state on all TP ranks would give identical shards."""
    sharded = [row for row in rows(RunFacts(tp=2)) if row.factor == "A" and row.partition_dim == 1]
    assert sharded
    one, other = (rank_of(RunFacts(tp=2), rank) for rank in range(2))
    assert not any(torch.equal(initial_factor(row, 0, one), initial_factor(row, 0, other)) for row in sharded)


def test_seed_and_name_decide() -> None:
    first, *others = [row for row in rows(RunFacts()) if row.factor == "A"]
    assert torch.equal(full_initial_factor(first, 3), full_initial_factor(first, 3))
    assert not torch.equal(full_initial_factor(first, 3), full_initial_factor(first, 4))
    same_shape = [row for row in others if row.full_shape == first.full_shape]
    assert same_shape
    assert not any(torch.equal(full_initial_factor(first, 3), full_initial_factor(row, 3)) for row in same_shape)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for row in rows(RunFacts()):
        full_initial_factor(row, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_storage_dtype() -> None:
    row = rows(RunFacts(), dtype="bfloat16")[0]
    exact = full_initial_factor(row, 0)
    assert torch.equal(initial_factor(row, 0, ParallelRun.single()), exact.to(torch.bfloat16))
