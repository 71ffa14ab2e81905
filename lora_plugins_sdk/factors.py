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
from lora_plugins_sdk.table import ParamRow, SitePlan

# A tensor shaped like a stored parameter: its values, or what an optimizer keeps for it.
TensorOf = Callable[[nn.Parameter], torch.Tensor]


class LoraFactors(nn.Module):
    """A stacked `[n * r, in]` and one B `[out, r]` per adapted projection, this rank's part of each.

    Every parameter carries what host trainers look for (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
    `sequence_parallel`, `allreduce`) and what the SDK's reduction reads (`grad_sum_group`).

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
        # Ranks that hold different parts of the input must drop independently of each other.
        self._mask_stream = run.tp_rank if plan.region.tokens_split or plan.rows[0].partition_dim == 1 else 0
        for name, rows in self.stored_rows().items():
            values = [initial_factor(row, lora.seed, run.tp_rank) for row in rows]
            parameter = nn.Parameter(torch.cat(values).to(device))
            _tag(parameter, rows)
            self.register_parameter(name, parameter)

    def stored_rows(self) -> dict[str, list[ParamRow]]:
        """Rows of the table by the parameter that stores them, in stacking order."""
        grouped: dict[str, list[ParamRow]] = {}
        for row in self.plan.rows:
            grouped.setdefault(row.param, []).append(row)
        return grouped

    @property
    def a(self) -> nn.Parameter:
        """Stacked A factors `[n * r, in]`."""
        return self.get_parameter("A")

    @property
    def bs(self) -> list[nn.Parameter]:
        """B factors in the order of the adapted projections."""
        return [self.get_parameter(row.param) for row in self.plan.rows if row.factor == "B"]

    def local(self, row: ParamRow, of: TensorOf = torch.Tensor.detach) -> torch.Tensor:
        """This rank's part of one factor, a view into its stored parameter `[local_shape]`.

        Args:
            row: the factor.
            of: what to view in place of the parameter itself, a tensor of its shape (an optimizer's moment).
        """
        return of(self.get_parameter(row.param))[row.stacked_at : row.stacked_at + row.local_shape[0]]

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


def _tag(parameter: nn.Parameter, rows: list[ParamRow]) -> None:
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
        "allreduce": not rows[0].expert,
        "grad_sum_group": groups.pop(),
    }
    for name, value in attributes.items():
        setattr(parameter, name, value)
