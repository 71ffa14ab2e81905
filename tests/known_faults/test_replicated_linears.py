"""Replicated linears under sequence parallelism: each rank's tokens give a part of every factor's gradient."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from known_faults.stack_host import StackModel, adapted
from torch import Tensor

from lora_plugins_sdk import reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world

TOKENS = torch.arange(12) % 16


def gradients() -> tuple[dict[str, Tensor], list[int], list[tuple[bool, int]]]:
    """Gradients of one pass over this rank's tokens, the size of each sum over ranks, the marks of each factor."""
    run = current_run()
    model = StackModel()
    adapter = adapted(model, run)
    mine = slice(run.tp_rank * 12 // run.facts.tp, (run.tp_rank + 1) * 12 // run.facts.tp)
    upstream = torch.linspace(0, 3, 96).view(12, 8).cos()
    (model(TOKENS[mine]) * upstream[mine]).sum().backward()
    sums: list[int] = []
    right = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sums.append(tensor.numel())
        return right(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        reduce_grads(model)
    named = dict(adapter.named_parameters())
    found = {name: one.grad.clone() for name, one in named.items() if one.grad is not None}
    marks = [(vars(one)["tensor_model_parallel"], vars(one)["partition_dim"]) for one in named.values()]
    return found, sums, marks


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_their_gradients_are_summed_over_tp() -> None:
    """B9: factors of a duplicated linear were treated as shards; they are whole on each rank and summed over TP."""
    ((expected, _, _),) = run_world(gradients, Layout())
    ranks = run_world(gradients, Layout(tp=2, sequence_parallel=True))
    assert len(expected) == 6
    for found, _, marks in ranks:
        assert set(marks) == {(False, -1)}
        for name, grad in expected.items():
            assert grad.abs().max() > 1e-3
            torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=0)
            assert torch.equal(found[name], ranks[0][0][name])


@pytest.mark.world
def test_one_sum_in_a_step() -> None:
    """B4: replicas drifted apart where each factor was synchronised by itself, or not at all; one sum takes all."""
    everything = 3 * (2 * 8 + 8 * 2)
    assert run_world(gradients, Layout())[0][1] == []
    for _, sums, _ in run_world(gradients, Layout(tp=2, sequence_parallel=True)):
        assert sums == [everything]
