"""Adam's moments in full logical form: they are saved and resharded as the factors they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.factors import TensorOf
from lora_plugins_sdk.gather import gather_factors
from lora_plugins_sdk.scatter import scatter_factors
from lora_plugins_sdk.table import ParamRow

# Running means of the gradient and of its square (Kingma and Ba 2015), as torch.optim.Adam and AdamW name them.
MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_adam_moments(adapter: LoraAdapter, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Both moments of every factor, `row.full_shape`, on every rank. Collective over the TP and PP groups.

    Args:
        adapter: the attached adapter.
        optimizer: torch's Adam or AdamW over the adapter's parameters, after one step or more; None on a stage that
            holds none.

    Returns:
        `exp_avg.<HF name>` and `exp_avg_sq.<HF name>` -> tensor, the same under every topology.
    """
    return {
        _name(moment, row): tensor
        for moment in MOMENTS
        for row, tensor in gather_factors(adapter, _moment_of(optimizer, moment)).items()
    }


def load_adam_moments(
    adapter: LoraAdapter, optimizer: torch.optim.Optimizer | None, tensors: Mapping[str, torch.Tensor], *, step: int
) -> None:
    """Put moments back under any topology: the exact inverse of `gather_adam_moments`.

    Args:
        adapter: the attached adapter.
        optimizer: as for `gather_adam_moments`; what it holds is replaced.
        tensors: what `gather_adam_moments` gave.
        step: updates that these moments have seen.

    Raises:
        LoraError: nothing was changed. Lists every tensor that is missing, left over, of another shape or dtype, or
            not finite.
    """
    raise_if_any("these optimizer moments cannot be loaded:", _problems(adapter, tensors))
    if optimizer is None:
        return
    for parameter in adapter.parameters():
        # As torch makes it before the first update; the counter lives on the CPU.
        state = {moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
    for moment in MOMENTS:
        fulls = {row: tensors[_name(moment, row)] for row in adapter.table.rows}
        scatter_factors(adapter, fulls, _moment_of(optimizer, moment))


def _name(moment: str, row: ParamRow) -> str:
    return f"{moment}.{row.hf_name}"


def _moment_of(optimizer: torch.optim.Optimizer | None, moment: str) -> TensorOf:
    def moment_of(parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, nn.Parameter):
            return torch.zeros_like(parameter)  # pinned: nothing has updated it, and nothing is written back
        assert optimizer is not None, "a stage with factors has an optimizer"
        return optimizer.state[parameter][moment]

    return moment_of


def _problems(adapter: LoraAdapter, tensors: Mapping[str, torch.Tensor]) -> Iterator[Diagnostic]:
    cure = "use a complete checkpoint of a run with these LoRA options"
    expected = {_name(moment, row): row for moment in MOMENTS for row in adapter.table.rows}
    for name in sorted(expected.keys() ^ tensors.keys()):
        reason = "is missing" if name in expected else "belongs to no factor of the attached adapter"
        yield Diagnostic(subject=name, reason=reason, cure=cure)
    for name in sorted(expected.keys() & tensors.keys()):
        row, tensor = expected[name], tensors[name]
        if tuple(tensor.shape) != row.full_shape or tensor.dtype != getattr(torch, row.dtype):
            reason = f"is {tensor.dtype} {list(tensor.shape)}, expected {row.dtype} {list(row.full_shape)}"
            yield Diagnostic(subject=name, reason=reason, cure=cure)
        elif not bool(torch.isfinite(tensor).all()):
            yield Diagnostic(subject=name, reason="holds NaN or infinite values", cure="use an earlier checkpoint")
        elif row.pinned and bool(tensor.any()):
            yield Diagnostic(
                subject=name,
                reason=f"belongs to {row.hf_module}, which this run holds at zero (pinned_modules)",
                cure="load the weights alone, or leave the pin out",
            )
