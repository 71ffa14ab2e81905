"""Context parallelism of the torch host: the zig-zag deal, and attention over gathered keys and values."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.attention import TorchCausalAttention
from lora_plugins_sdk.hosts.context_parallel import zigzag_positions
from lora_plugins_sdk.testing import Layout, current_run, run_world


def test_every_rank_gets_a_part_from_each_end() -> None:
    assert zigzag_positions(8, 0, 1).tolist() == list(range(8))
    assert zigzag_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    with pytest.raises(LoraError, match="pad it to a multiple of 4"):
        zigzag_positions(6, 0, 2)


def _attend(inputs: list[Tensor], upstream: Tensor) -> dict[str, object]:
    """This rank's part of the output, and of the inputs' gradients."""
    from megatron.core import parallel_state

    size = current_run().facts.cp
    mine = zigzag_positions(upstream.shape[0], parallel_state.get_context_parallel_rank(), size)
    groups = SimpleNamespace(cp=parallel_state.get_context_parallel_group())
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=size)
    attention = TorchCausalAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    local = [one[mine].requires_grad_(True) for one in inputs]
    output = attention(*local, None)
    return {"mine": mine, "output": output, "grads": torch.autograd.grad(output, local, upstream[mine])}


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_attention_equals_that_of_one_process() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(8, 2, heads, 4, dtype=torch.float64) for heads in (6, 3, 3)]
    upstream = torch.randn(8, 2, 24, dtype=torch.float64)
    (whole,) = run_world(_attend, Layout(), inputs, upstream)
    for part in run_world(_attend, Layout(cp=2), inputs, upstream):
        torch.testing.assert_close(part["output"], whole["output"][part["mine"]])
        for actual, expected in zip(part["grads"], whole["grads"], strict=True):
            torch.testing.assert_close(actual, expected[part["mine"]])
