"""The stored parameters of one site, registered as `<host linear>.lora`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.init import initial_factor
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.region import ExpertRegion
from lora_plugins_sdk.table import ParamRow, SitePlan

# A tensor shaped like a stored one: its values, or what an optimizer keeps for it. What is pinned is no parameter.
TensorOf = Callable[[torch.Tensor], torch.Tensor]


class LoraFactors(nn.Module):
    """A stacked `[n * r, in]` and one B `[out, r]` per adapted projection, this rank's part of each.

    What the run pins at zero is held in buffers: no optimizer, gradient or weight decay reaches it.

    With experts their number comes first: `[local experts, n * r, in]` and `[local experts, out, r]`, or 1 where they
    share the factor.

    Every parameter carries what host trainers look for (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
    `sequence_parallel`, `allreduce`, with experts `shared`) and what the SDK's reduction reads (`grad_sum_group`).

    Args:
        plan: the site with its rows.
        lora: scale, dropout and seed.
        run: this rank's place.
        device: where the factors live.

    Raises:
        LoraError: overrides gave different gradient sums to rows that are stored in one parameter.
    """

    def __init__(self, plan: SitePlan, lora: LoraConfig, run: ParallelRun, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.scale = lora.scale
        self.enabled = True
        self._dropout = lora.dropout
        self._mask_stream = _mask_stream(plan, run)
        for name, rows in self.stored_rows().items():
            values = [initial_factor(row, lora.seed, run) for row in rows]
            value = torch.cat(values, dim=-2).to(device)
            if rows[0].pinned:
                self.register_buffer(name, value)
                continue
            parameter = nn.Parameter(value)
            _tag(parameter, rows, run)
            self.register_parameter(name, parameter)

    def stored_rows(self) -> dict[str, list[ParamRow]]:
        """Rows of the table by the parameter that stores them, in stacking order."""
        grouped: dict[str, list[ParamRow]] = {}
        for row in self.plan.rows:
            grouped.setdefault(row.param, []).append(row)
        return grouped

    def stored(self, name: str) -> torch.Tensor:
        """What `stored_rows` names: a parameter, or a buffer where its rows are pinned."""
        return self.get_buffer(name) if name in self._buffers else self.get_parameter(name)

    @property
    def a(self) -> nn.Parameter:
        """Stacked A factors `[n * r, in]`; experts first."""
        return self.get_parameter("A")

    @property
    def bs(self) -> list[nn.Parameter]:
        """B factors in the order of the trained projections."""
        return [self.get_parameter(row.param) for row in self.plan.rows if row.factor == "B" and not row.pinned]

    def local(self, row: ParamRow, of: TensorOf = torch.Tensor.detach) -> torch.Tensor:
        """This rank's part of one factor, a view into its stored tensor `[local_shape]`.

        Args:
            row: the factor.
            of: what to view in place of the tensor itself, one of its shape (an optimizer's moment).
        """
        return of(self.stored(row.param)).narrow(-2, row.stacked_at, row.local_shape[-2])

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout on the branch input while training.

        The mask's seed is drawn from torch's global generator, which activation recompute restores and TP ranks share;
        the mask itself comes from a generator of its own, so ranks with different parts of the input get different
        masks.
        """
        if self._dropout == 0.0 or not self.training:
            return x
        seed = int(torch.randint(2**62, ()).item())
        generator = torch.Generator(x.device).manual_seed(seed + self._mask_stream)
        keep = torch.rand(x.shape, generator=generator, device=x.device) >= self._dropout
        return x * keep / (1.0 - self._dropout)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow `.to(device)`, but keep the factors' dtype when a wrapper casts the whole model (`Float16Module`)."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor.new_empty(0)).device), recurse)


def _mask_stream(plan: SitePlan, run: ParallelRun) -> int:
    """Ranks that hold different parts of the input must drop independently of each other."""
    split = plan.rows[0].partition_dim >= 0  # A is split as the input's width
    if isinstance(plan.region, ExpertRegion):
        place = run.expert_dp_rank * run.facts.ep + run.ep_rank
        return place * run.facts.etp + (run.etp_rank if split else 0)
    return run.tp_rank if split or plan.region.tokens_split else 0


def _tag(parameter: nn.Parameter, rows: list[ParamRow], run: ParallelRun) -> None:
    groups = {row.grad_sum_group for row in rows}
    if len(groups) > 1:
        raise LoraError(
            f"{rows[0].host_module}.lora.{rows[0].param}",
            reason=f"its rows are to be summed over different groups ({', '.join(str(one) for one in groups)})",
            cure="let lora_grad_sum_groups answer the same for all projections that share an input",
        )
    attributes = {
        "tensor_model_parallel": rows[0].partition_dim >= 0,
        "partition_dim": rows[0].partition_dim,
        "partition_stride": 1,
        # The host would otherwise sum the gradient a second time.
        "sequence_parallel": False,
        # False: the host reduces it over the experts' own data-parallel domain.
        "allreduce": not (rows[0].expert and run.facts.experts_apart),
        "grad_sum_group": groups.pop(),
    }
    if rows[0].expert:
        # Which ranks hold a copy, megatron-core asks of TP, and experts live elsewhere. `shared` leaves copies out of
        # the gradient norm whatever the group; so the other mark must not.
        copy = (rows[0].partition_dim < 0 and run.etp_rank > 0) or (rows[0].expert_dim < 0 and run.ep_rank > 0)
        attributes |= {"tensor_model_parallel": True, "shared": copy}
    for name, value in attributes.items():
        setattr(parameter, name, value)
