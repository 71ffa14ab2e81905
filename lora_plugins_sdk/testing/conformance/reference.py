"""The independent reader: transformers alone, `scale * B A` added to each weight by plain arithmetic."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParamRow
from lora_plugins_sdk.testing.conformance.hf_weights import hf_weights
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers computes with the folded weights.

    Args:
        logits: `[microbatches, samples, tokens, vocabulary]`.
        outputs: of each adapted HF module that computes its projection alone (no experts), `[microbatches, samples,
            tokens, out]`.
        deltas: the adapter's share of these outputs.
        output_grads: the loss's gradient with respect to these.
        grads: of each factor by `ParamRow.init_key`, by the chain rule from the folded weight's gradient.
    """

    logits: Tensor
    outputs: Mapping[str, Tensor]
    deltas: Mapping[str, Tensor]
    output_grads: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]


@cache
def base_directory(subject: Subject) -> Path:
    """A HF directory of the subject's config with lively weights, made once and removed at exit.

    Every matrix is drawn with unit gain, and what is one-dimensional (norms, biases) is perturbed: equal norms would
    hide one that is left out or mixed up.
    """
    folder = Path(tempfile.mkdtemp(prefix="lora-conformance-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _save(new_model(subject), folder / "base")


def save_folded(subject: Subject, problem: Problem) -> Path:
    """A HF directory of the base with the problem's factors merged in, next to the base."""
    model, table = new_model(subject), subject.table(RunFacts())
    for weight in hf_weights(model, table).values():
        weight.fold(problem.factors, delta_scale(table.lora))
    return _save(model, base_directory(subject).parent / "merged")


def _save(model: Any, directory: Path) -> Path:
    with quiet_transformers():
        model.save_pretrained(directory)
    return directory


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def new_model(subject: Subject) -> Any:
    """The base in transformers, float32, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(subject.hf_config)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed)  # some models draw vectors too, which are only perturbed below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(subject.seed)
    values = subject.selected.architecture.tiny_values
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for value in (value for pattern, value in values.items() if fnmatchcase(name, pattern)):
                parameter.fill_(value)
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    return model


@cache
def folded_reference(subject: Subject) -> Reference:
    """The reference of the subject's standard problem."""
    return make_reference(subject, make_problem(subject))


def make_reference(
    subject: Subject, problem: Problem, *, dtype: torch.dtype = torch.float32, **changes: object
) -> Reference:
    """Fold, run, differentiate.

    Args:
        subject: what is tested.
        problem: batch, loss and factors.
        dtype: of the folded weights; buffers stay float32, as `from_pretrained` leaves them.
        changes: other LoRA options than the subject's.
    """
    model, table = new_model(subject).requires_grad_(False), subject.table(RunFacts(), **changes)
    weights = hf_weights(model, table)
    # Experts are computed without a module each: what they put out is judged by what follows from it.
    watched = {name: weight for name, weight in weights.items() if weight.module is not None}
    inputs: dict[str, list[Tensor]] = {name: [] for name in watched}
    outputs: dict[str, list[Tensor]] = {name: [] for name in watched}
    for weight in weights.values():
        for parameter in weight.parameters:
            parameter.requires_grad_(True)
        weight.fold(problem.factors, delta_scale(table.lora))
    if dtype is not torch.float32:
        model.set_experts_implementation("eager")  # the grouped kernel asks for widths that tiny models lack
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    for name, weight in watched.items():
        assert weight.module is not None, "chosen so"
        weight.module.register_forward_hook(_keep(inputs[name], outputs[name]))
    logits = [model(tokens).logits for tokens in problem.tokens]
    by_sample = problem.tokens.shape[1:]  # a router sees its tokens in one row
    loss = sum((one * weights).sum() for one, weights in zip(logits, problem.upstream, strict=True)) / len(logits)
    assert isinstance(loss, Tensor)
    loss.backward()
    return Reference(
        logits=torch.stack(logits).detach(),
        # A head may have rows for padding of the vocabulary, which no projection has.
        outputs={
            name: _of_samples(seen, by_sample).detach()[..., weights[name].rows] for name, seen in outputs.items()
        },
        deltas={
            name: delta_scale(table.lora)
            * _narrow(_of_samples(seen, by_sample), weights[name].a, problem.factors)
            @ problem.factors[weights[name].b.init_key].t()
            for name, seen in inputs.items()
        },
        output_grads={
            name: _of_samples([_grad(one) for one in seen], by_sample)[..., weights[name].rows]
            for name, seen in outputs.items()
        },
        grads={
            key: grad
            for weight in weights.values()
            for key, grad in weight.factor_grads(problem.factors, delta_scale(table.lora)).items()
        },
    )


def delta_scale(lora: LoraConfig) -> float:
    """The factor on `B A`, worked out here: `alpha / rank`, or `alpha / sqrt(rank)` (Kalajdzievski 2023)."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def _narrow(inputs: Tensor, a: ParamRow, factors: Mapping[str, Tensor]) -> Tensor:
    """`x A^T`, `[..., rank]`; of an embedding's ids `[..., 1]` the columns of A that they name."""
    columns = factors[a.init_key].t()
    return columns[inputs.squeeze(-1)] if a.embedding else inputs.to(columns.dtype) @ columns


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "every folded weight is part of the loss"
    return tensor.grad


def _of_samples(seen: list[Tensor], by_sample: torch.Size) -> Tensor:
    """What was kept of each microbatch as `[microbatches, samples, tokens, width]`."""
    return torch.stack([one.reshape(*by_sample, -1) for one in seen])


def _keep(inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        output = result[0] if isinstance(result, tuple) else result  # a router answers logits first
        output.retain_grad()
        inputs.append(args[0].detach())
        outputs.append(output)

    return keep
