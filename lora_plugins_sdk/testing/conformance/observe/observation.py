"""The standard run of one rank: import, one pass, two optimizer steps, and exports on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.attachment import attach
from lora_plugins_sdk.peft_export import export_adapter
from lora_plugins_sdk.peft_import import import_adapter
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.observe.capture import Captured, adapted_linears, capturing
from lora_plugins_sdk.testing.conformance.observe.session import Session, build_base, my_positions, run_pass, wrap
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.reference import base_directory
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout, current_run

LEARNING_RATE = 0.002
MOMENTUM = 0.9
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of one rank.

    Args:
        logits: of each of its microbatches; empty before the last stage.
        captured: what passed through its linears.
        grads: gradient of each factor after all reductions, this rank's part by `ParamRow.init_key`.
    """

    logits: list[Tensor]
    captured: Captured
    grads: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RankObservation(Pass):
    """What one rank saw: the first pass and what came before and after it.

    Args:
        rank: global rank.
        tp_rank, pp_rank, dp_rank, etp_rank, ep_rank, expert_dp_rank: its place.
        positions: of each sequence, that it was given.
        linears: class of each adapted host linear on this rank.
        counted: whether this rank counts a factor in the gradient norm, by the host's own marks.
        grad_norm: of the whole model, each factor counted once by the host's own marks.
        initial: the factors as initialised, exported (every rank has all of it).
        imported: what was imported, exported again.
        stepped: each factor after two optimizer steps.
        exported: the adapter after these steps.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    etp_rank: int
    ep_rank: int
    expert_dp_rank: int
    positions: Tensor
    linears: dict[str, str]
    counted: dict[str, bool]
    grad_norm: float
    initial: dict[str, Tensor]
    imported: dict[str, Tensor]
    stepped: dict[str, Tensor]
    exported: dict[str, Tensor]


def observed(context: Context, layout: Layout) -> list[RankObservation]:
    """What every rank of a layout observed in the standard run; the world is started once."""
    subject = context.subject
    return context.keep(
        layout, lambda: context.world(observe, layout, subject, base_directory(subject), make_problem(subject))
    )


def observe(subject: Subject, directory: Path, problem: Problem) -> RankObservation:
    """Run on every rank of a world."""
    run = current_run()
    model = build_base(subject, directory)
    adapter = attach(model, subject.selected, subject.hf_config, subject.lora(), run)
    initial = _exported(model)
    import_adapter(model, peft_adapter(subject, problem.factors))
    imported = _exported(model)
    session = Session(model=model, chunk=wrap(model), adapter=adapter)
    first, norm = watched_pass(session, problem), gradient_norm(adapter)
    optimizer_steps(session, problem)
    return RankObservation(
        rank=dist.get_rank(),
        tp_rank=run.tp_rank,
        pp_rank=run.pp_rank,
        dp_rank=run.dp_rank,
        etp_rank=run.etp_rank,
        ep_rank=run.ep_rank,
        expert_dp_rank=run.expert_dp_rank,
        positions=my_positions(run, problem.tokens.shape[-1]),
        linears={name: _class_name(place.module) for name, place in adapted_linears(adapter).items()},
        logits=first.logits,
        captured=first.captured,
        grads=first.grads,
        counted=_counted(adapter),
        grad_norm=norm,
        initial=initial,
        imported=imported,
        stepped=local_factors(adapter),
        exported=_exported(model),
    )


def watched_pass(session: Session, problem: Problem) -> Pass:
    """One pass through the host's schedule, reductions included."""
    with capturing(adapted_linears(session.adapter)) as captured:
        logits = run_pass(session.chunk, session.run, problem)
    return Pass(logits=logits, captured=captured, grads=local_grads(session.adapter))


def local_grads(adapter: LoraAdapter) -> dict[str, Tensor]:
    """This rank's part of every factor's gradient, as an optimizer would find it."""
    return {
        row.init_key: factors.local(row, lambda stored: vars(stored)["main_grad"]).clone()
        for factors in adapter.factors()
        for row in factors.plan.rows
        if not row.pinned
    }


def local_factors(adapter: LoraAdapter) -> dict[str, Tensor]:
    """This rank's part of every factor."""
    return {row.init_key: factors.local(row).clone() for factors in adapter.factors() for row in factors.plan.rows}


def gradient_norm(adapter: LoraAdapter) -> float:
    """2-norm of the whole gradient, replicas counted once as megatron-core's optimizers do it.

    They leave out a parameter that is marked `shared`, keep one that is marked `tensor_model_parallel` on every rank
    and any other on TP rank 0 alone, then sum the squares over the model parallel group, that of the experts where
    `allreduce` is false.
    """
    from megatron.core import parallel_state as ps

    total = torch.zeros((), device=torch.cuda.current_device())
    for dense in (True, False):
        counted = [
            vars(one)["main_grad"]
            for one in adapter.parameters()
            if _counts(one) and getattr(one, "allreduce", True) is dense
        ]
        square = _square(counted) if counted else torch.zeros_like(total)
        group = ps.get_model_parallel_group() if dense else ps.get_expert_tensor_model_pipeline_parallel_group()
        dist.all_reduce(square, group=group)
        total += square
    return total.sqrt().item()


def _counted(adapter: LoraAdapter) -> dict[str, bool]:
    return {
        row.init_key: _counts(factors.get_parameter(row.param))
        for factors in adapter.factors()
        for row in factors.plan.rows
    }


def _counts(parameter: torch.nn.Parameter) -> bool:
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def _square(tensors: list[Tensor]) -> Tensor:
    return torch.stack([one.float().square().sum() for one in tensors]).sum()


def optimizer_steps(session: Session, problem: Problem) -> None:
    """Optimizer steps; the first uses the gradients that are there. Momentum keeps state without hiding small errors.

    Adam would divide each entry by its own size, and so turn rounding of tiny entries into steps of full length.
    """
    parameters = session.adapter.parameters()
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM) if parameters else None
    for step in range(STEPS):
        if step:
            run_pass(session.chunk, session.run, problem)
        for parameter in parameters:
            parameter.grad = vars(parameter)["main_grad"]
        if optimizer is not None:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None


def _class_name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _exported(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in export_adapter(model).tensors.items()}
