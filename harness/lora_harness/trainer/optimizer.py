"""AdamW on the adapter, with a gradient norm that counts every logical parameter once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lora_plugins_sdk import ParallelRun

if TYPE_CHECKING:
    from lora_harness.config import OptimizerSection


def gradient(parameter: nn.Parameter) -> Tensor:
    """The reduced gradient: megatron-core's DistributedDataParallel keeps it in `main_grad`."""
    main_grad = getattr(parameter, "main_grad", None)
    grad = parameter.grad if main_grad is None else main_grad
    assert grad is not None, "a trained factor has a gradient buffer"
    return grad


def global_grad_norm(parameters: Sequence[nn.Parameter], run: ParallelRun) -> float:
    """L2 norm of the gradient of the whole adapter, the same on every rank and under every topology.

    Shards add up over TP, and over ETP x EP for experts; a factor that several of these ranks hold counts on the first
    one alone; stages add up over PP. Data parallel ranks hold the same gradients.

    Args:
        parameters: this rank's trained parameters; may be empty on a stage without adapted modules.
        run: this rank's groups.
    """
    # By the marks that megatron-core's optimizers read: `allreduce` is False where experts are laid out on their own.
    totals = {True: torch.zeros((), dtype=torch.float64), False: torch.zeros((), dtype=torch.float64)}
    for parameter in parameters:
        whole = not getattr(parameter, "tensor_model_parallel", False)
        if not getattr(parameter, "shared", False) and (run.tp_rank == 0 or not whole):
            totals[getattr(parameter, "allreduce", True)] += gradient(parameter).double().square().sum().cpu()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense, experts = (
        _sum(totals[flag].to(device), group) for flag, group in ((True, run.tp_group), (False, run.etp_ep_group))
    )
    return _sum(dense + experts, run.pp_group).sqrt().item()


def _sum(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


class AdapterOptimizer:
    """AdamW on fp32 parameters, whose gradients live in `main_grad` or `grad`.

    Args:
        parameters: this rank's trained parameters.
        section: rates and bounds.
        run: this rank's groups.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], section: OptimizerSection, run: ParallelRun) -> None:
        self._parameters = list(parameters)
        self._clip = section.clip_grad
        self._run = run
        # A stage may hold no adapted module (targets in other layers only), and AdamW refuses an empty list.
        self._adamw = (
            torch.optim.AdamW(
                self._parameters,
                lr=section.lr,
                betas=section.betas,
                eps=section.eps,
                weight_decay=section.weight_decay,
            )
            if self._parameters
            else None
        )

    @property
    def adamw(self) -> torch.optim.AdamW | None:
        """The optimizer itself; None on a stage that trains nothing."""
        return self._adamw

    def step(self, lr: float) -> float:
        """Clip and apply the gradients; collective over the TP and PP groups.

        Args:
            lr: learning rate of this update.

        Returns:
            The global gradient norm before clipping.
        """
        norm = global_grad_norm(self._parameters, self._run)
        if self._adamw is None:
            return norm
        # As torch.nn.utils.clip_grad_norm_ scales.
        factor = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        for parameter in self._parameters:
            grad = gradient(parameter)
            parameter.grad = grad.mul_(factor) if factor < 1.0 else grad
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None
        return norm
