"""What host trainers read off the parameters, and that it is what the table says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sdk_toy import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import LoraConfig, ParallelRun, RunFacts, SelectedPlugin, derive_table
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.shards import shard

LORA = LoraConfig(rank=2, target_modules=("all-linear", "lm_head"))
PLUGIN = SelectedPlugin.of(ARCHITECTURE)


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("facts", [RunFacts(), RunFacts(tp=2), RunFacts(tp=2, sequence_parallel=True)], ids=str)
def test_attributes_follow_the_table(facts: RunFacts, tp_rank: int) -> None:
    """B13: a replicated factor that claims to be split would be counted once per rank in the gradient norm."""
    seen = set()
    for plan in derive_table(PLUGIN, HF_CONFIG, LORA, facts).plans:
        factors = LoraFactors(plan, LORA, ParallelRun(facts=facts, tp_rank=tp_rank % facts.tp), torch.device("cpu"))
        for row in plan.rows:
            parameter = factors.get_parameter(row.param)
            assert parameter.tensor_model_parallel is (row.partition_dim >= 0)  # type: ignore[attr-defined]
            assert parameter.partition_dim == row.partition_dim  # type: ignore[attr-defined]
            assert parameter.grad_sum_group == row.grad_sum_group  # type: ignore[attr-defined]
            # megatron-core would sum a gradient so marked a second time.
            assert parameter.sequence_parallel is False  # type: ignore[attr-defined]
            assert parameter.allreduce is True  # type: ignore[attr-defined]
            assert factors.local(row).shape == row.local_shape
            seen.add((row.partition_dim, row.grad_sum_group))
    expected: set[tuple[int, str | None]] = {(-1, None)}
    if facts.tp > 1:
        expected = {(-1, "tp" if facts.sequence_parallel else None), (0, None), (1, None)}
    assert seen == expected


@given(vocabulary=st.integers(4, 40), hidden=st.integers(1, 5), tp=st.sampled_from([1, 2]), data=st.data())
def test_shards_of_any_factor_are_the_whole_and_zero_padding(
    vocabulary: int, hidden: int, tp: int, data: st.DataObject
) -> None:
    config = HF_CONFIG | {"vocab_size": vocabulary, "hidden_size": 4 * hidden, "intermediate_size": 2 * hidden}
    lora = LoraConfig(rank=1, target_modules=("*",))
    rows = derive_table(PLUGIN, config, lora, RunFacts(tp=tp)).rows
    row = data.draw(st.sampled_from(rows))
    full = torch.randn(row.full_shape)
    parts = [shard(row, full, ParallelRun(facts=RunFacts(tp=tp), tp_rank=rank)) for rank in range(tp)]
    assert all(part.shape == row.local_shape for part in parts)
    if row.partition_dim == -1:
        assert all(torch.equal(part, full) for part in parts)
        return
    whole = torch.cat(parts, dim=row.partition_dim)
    assert torch.equal(whole[: full.shape[0]], full) and not whole[full.shape[0] :].any()
