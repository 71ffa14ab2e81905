"""Factors that experts share over ranks: drawn alike, summed once a step for each group, and alike after many steps."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from inkling_tiny import CONFIG, make_model, tokens
from inkling_weights import copy_weights
from torch import Tensor

from lora_plugin_inkling.model.build import build_model
from lora_plugins_sdk import LoraConfig, attach, load_plugin, reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world

STEPS = 6
LORA = LoraConfig(rank=4, alpha=8, target_modules=("all-linear", "lm_head"), expert_sharing="outer")
EP2 = Layout(dp=2, ep=2)
TP2_EP2 = Layout(tp=2, ep=2, etp=1, sequence_parallel=True)


def _train(hf: dict[str, Tensor]) -> dict[str, Any]:
    """Steps from B != 0. Of each step the sizes of the sums over ranks; of the factors that experts share and of those
    that TP ranks share the values before and after.
    """
    run, plugin = current_run(), load_plugin("inkling_text")
    model = build_model(CONFIG, run)
    copy_weights(model, hf, CONFIG)
    adapter = attach(model, plugin, CONFIG, LORA, run)
    wholes = {
        row.init_key: (row.grad_sum_group, factors, row)
        for factors in adapter.factors()
        for row in factors.plan.rows
        if row.partition_dim < 0 and row.expert_dim < 0
    }

    def values() -> dict[str, Tensor]:
        return {key: factors.local(row).detach().clone() for key, (_, factors, row) in wholes.items()}

    initial = values()
    with torch.no_grad():
        for factors in adapter.factors():
            for b in factors.bs:
                b.fill_(0.05)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.01)
    right, sizes = dist.all_reduce, []
    mine = tokens().chunk(run.facts.dp)[run.dp_rank]
    for _ in range(STEPS):
        (model(mine).square().sum() / 1000).backward()
        of_step: list[int] = []

        def counted(tensor: Tensor, *args: Any, seen: list[int] = of_step, **kwargs: Any) -> Any:
            seen.append(tensor.numel())
            return right(tensor, *args, **kwargs)

        with patch.object(dist, "all_reduce", counted):
            reduce_grads(model)
        sizes.append(of_step)
        for parameter in adapter.parameters():  # the host's own data-parallel sum, of what is not the experts'
            if getattr(parameter, "allreduce", True) and run.facts.dp > 1:
                right(parameter.grad, group=run.dp_group)
        optimizer.step()
        optimizer.zero_grad()
    groups = {key: group for key, (group, *_) in wholes.items()}
    expected = {
        name: sum(wholes[key][1].local(wholes[key][2]).numel() for key, group in groups.items() if group == name)
        for name in {*groups.values()} - {None}
    }
    return {"initial": initial, "sizes": sizes, "expected": expected, "trained": values()}


@pytest.mark.world
@pytest.mark.parametrize(("layout", "groups"), [(EP2, ("etp_ep",)), (TP2_EP2, ("etp_ep", "tp"))], ids=str)
def test_shared_factors_stay_the_same_on_every_rank(layout: Layout, groups: tuple[str, ...]) -> None:
    """B4, B5: on other ranks they were drawn from other states, and drifted apart by 0.09 in six steps."""
    hf = dict(make_model().state_dict())
    (alone,) = run_world(_train, Layout(), hf)
    assert alone["expected"].keys() == set() and alone["sizes"] == [[]] * STEPS
    ranks = run_world(_train, layout, hf)
    for rank in ranks:
        assert rank["expected"].keys() == set(groups)
        assert rank["sizes"] == [[rank["expected"][name] for name in sorted(groups)]] * STEPS, "one sum for each group"
        for key, value in rank["initial"].items():
            assert torch.equal(value, alone["initial"][key]), key
        for key, value in rank["trained"].items():
            assert not torch.equal(value, rank["initial"][key]), f"{key} does not move"
            assert torch.equal(value, ranks[0]["trained"][key]), f"{key} drifted apart"
            torch.testing.assert_close(value, alone["trained"][key], rtol=1e-3, atol=1e-5, msg=key)
