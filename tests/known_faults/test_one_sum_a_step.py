"""The gradients of all replicated factors travel in one sum for each step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from known_faults.stack_host import StackModel, adapted
from lora_plugins_sdk import reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world


def sizes_of_sums() -> tuple[list[int], list[Tensor]]:
    """How many entries each sum over ranks takes, and the gradients afterwards."""
    run = current_run()
    model = StackModel()
    adapter = adapted(model, run)
    tokens = torch.arange(12).chunk(run.facts.tp)[run.tp_rank]
    model(tokens).square().sum().backward()
    sizes: list[int] = []
    right = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return right(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        reduce_grads(model)
    return sizes, [parameter.grad for parameter in adapter.parameters() if parameter.grad is not None]


@pytest.mark.world
def test_one_sum_takes_all() -> None:
    """B4: replicas drifted apart in a few steps where factors were synchronised one by one, or some not at all."""
    factors = 3 * 2
    ((alone, expected),) = run_world(sizes_of_sums, Layout())
    assert alone == [] and len(expected) == factors
    for sizes, grads in run_world(sizes_of_sums, Layout(tp=2, sequence_parallel=True)):
        assert sizes == [sum(grad.numel() for grad in expected)]
        for grad, whole in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, whole, rtol=0, atol=1e-5 * whole.abs().max().item())
