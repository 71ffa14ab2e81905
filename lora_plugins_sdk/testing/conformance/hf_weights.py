"""The weights of the transformers model that projections adapt: a module's own, or a part of all experts' tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_plugins_sdk.table import ParameterTable, ParamRow, SitePlan


@dataclass(frozen=True, kw_only=True)
class HfWeight:
    """The weight of one projection, `[out, in]`, or `[experts, out, in]`; a stack's weights side by side, `[out, in]`.
    An embedding's, which is stored as `[in, out]`, is turned.

    Args:
        parameters: one that holds the weight, or several of one expert each.
        each: whether they are of one expert each.
        rows: where those of the projection lie within a parameter that holds several.
        module: what computes it and nothing else, where it is a module of its own.
        a, b: the table's rows.
    """

    parameters: tuple[nn.Parameter, ...]
    each: bool
    rows: slice
    module: nn.Module | None
    a: ParamRow
    b: ParamRow

    @property
    def value(self) -> Tensor:
        """A copy of the weight."""
        return self._of([one.detach() for one in self.parameters])

    @property
    def grad(self) -> Tensor:
        """Its gradient; zero for an expert that no token was sent to."""
        return self._of([torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters])

    def fold(self, factors: Mapping[str, Tensor], scale: float) -> None:
        """`W += scale * B A`, summed in float64."""
        delta = scale * factors[self.b.init_key].double() @ factors[self.a.init_key].double()
        folded = self.value.double() + delta
        if self.a.stack:
            folded = torch.stack(folded.chunk(self.a.stack, dim=self._side))
        with torch.no_grad():
            for parameter, value in zip(self.parameters, folded if self.each else [folded], strict=True):
                parameter[..., self.rows, :] = (value.mT if self.a.embedding else value).to(parameter.dtype)

    def factor_grads(self, factors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """With `W' = W + scale B A`: `dB = scale dW' A^T` and `dA = scale B^T dW'`, summed over experts that share."""
        d_weight = self.grad.double()
        a, b = factors[self.a.init_key].double(), factors[self.b.init_key].double()
        grads = {self.a: scale * b.mT @ d_weight, self.b: scale * d_weight @ a.mT}
        return {
            row.init_key: (grad.sum(0, keepdim=True) if row.expert and row.full_shape[0] == 1 else grad).float()
            for row, grad in grads.items()
        }

    @property
    def _side(self) -> int:
        """Dimension along which the weights of a stack lie side by side."""
        return 0 if self.b.stack_dim == 0 else 1

    def _of(self, tensors: list[Tensor]) -> Tensor:
        if self.a.stack:
            return torch.cat(list(tensors[0]), dim=self._side)
        mine = [one[..., self.rows, :] for one in tensors]
        if self.a.embedding:
            return mine[0].mT.clone()
        return torch.stack(mine) if self.each else mine[0].clone()


def hf_weights(model: Any, table: ParameterTable) -> dict[str, HfWeight]:
    """Every adapted projection's weight, by `ParamRow.hf_module`.

    Raises:
        AttributeError: the transformers model has no such module or parameter.
    """
    return {
        plan.rows[position].hf_module: hf_weight(model, plan, position)
        for plan in table.plans
        for position in range(len(plan.adapted))
    }


def hf_weight(model: Any, plan: SitePlan, position: int) -> HfWeight:
    """The weight of a plan's adapted projection, counted among the adapted ones.

    Raises:
        AttributeError: the transformers model has no such module or parameter.
    """
    a, b = plan.rows[position], plan.rows[position + len(plan.adapted)]
    parameters, module, first = _holders(model, plan, plan.adapted[position], a)
    # A head that the host pads may be padded in HF too; what belongs to no token is no part of the projection.
    head = getattr(plan.site.pack, "pad", False) and not plan.site.embedding
    part = (a.expert and plan.site.fused_hf) or head
    rows = slice(first, first + b.full_shape[-2]) if part else slice(None)
    each = a.expert and plan.site.fused_hf is None
    return HfWeight(parameters=parameters, each=each, rows=rows, module=module, a=a, b=b)


def _holders(
    model: Any, plan: SitePlan, index: int, row: ParamRow
) -> tuple[tuple[nn.Parameter, ...], nn.Module | None, int]:
    """Parameters that hold a projection's weight, its module if it has one, and its first row within them."""
    if row.stack:
        return (model.get_parameter(row.hf_module),), None, 0
    if not row.expert:
        module = model.get_submodule(row.hf_module)
        own = None if plan.site.projections[index].by_weight else module
        return (module.get_parameter("weight"),), own, 0
    if plan.site.fused_hf is not None:
        before = sum(plan.layout.rows(earlier) for earlier in range(index))
        return (model.get_parameter(plan.site.fused_hf.format(layer=plan.layer)),), None, before
    experts = max(one.full_shape[0] for one in plan.rows)
    modules = [model.get_submodule(row.hf_module.format(expert=number)) for number in range(experts)]
    return tuple(one.get_parameter("weight") for one in modules), None, 0
