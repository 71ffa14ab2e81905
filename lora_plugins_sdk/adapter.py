"""An attached adapter: what attach returns, and how free functions find it again on a wrapped model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.table import ParameterTable

_ATTRIBUTE = "_lora_adapter"

Model = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """One adapter on this rank's part of a model.

    Args:
        plugin: the selected plugin.
        table: the parameter table of the whole model, the same on every rank.
        hf_config: the model's HF config.
        run: this rank's place and groups.
        chunks: this rank's model chunks.
        handles: one per host linear on this rank, in table order; empty on a stage without targets.
        stages: pipeline stage that holds each host module.
        restore: closing it undoes everything that attach changed.
    """

    plugin: SelectedPlugin
    table: ParameterTable
    hf_config: Mapping[str, object]
    run: ParallelRun
    chunks: tuple[nn.Module, ...]
    handles: tuple[Any, ...]
    stages: Mapping[str, int]
    restore: ExitStack

    def factors(self) -> Iterator[LoraFactors]:
        """The factors of every site on this rank, in table order."""
        return (handle.factors for handle in self.handles)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters of this rank under model-wide names, in table order."""
        for factors in self.factors():
            for name, parameter in factors.named_parameters():
                yield f"{factors.plan.host_module}.lora.{name}", parameter

    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of this rank, in table order."""
        return [parameter for _, parameter in self.named_parameters()]

    def refuse_other_trainable(self) -> None:
        """What a checkpoint of the adapter would lose is an error.

        Raises:
            LoraError: listing this rank's trainable parameters that are not the adapter's.
        """
        own = {id(parameter) for parameter in self.parameters()}
        raise_if_any(
            "more than the adapter is trained:",
            (
                Diagnostic(
                    subject=name,
                    reason="is trainable and no part of the adapter, so a checkpoint would lose it",
                    cure="freeze it with requires_grad_(False)",
                )
                for chunk in self.chunks
                for name, parameter in chunk.named_parameters()
                if parameter.requires_grad and id(parameter) not in own
            ),
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model alone while the context is open (reference log-probs); nested contexts and errors are safe."""
        before = [(factors, factors.enabled) for factors in self.factors()]
        try:
            for factors, _ in before:
                factors.enabled = False
            yield
        finally:
            for factors, enabled in before:
                factors.enabled = enabled


def chunks_of(model: Model) -> tuple[nn.Module, ...]:
    """A model as its chunks: one module, or a list of virtual pipeline chunks."""
    return (model,) if isinstance(model, nn.Module) else tuple(model)


def mark(chunks: Iterable[nn.Module], adapter: LoraAdapter | None) -> None:
    """Leave (or clear) the trace by which `adapter_of` finds the adapter, from inside or outside of any wrapper."""
    for module in (module for chunk in chunks for module in _and_wrapped(chunk)):
        if adapter is None:
            module.__dict__.pop(_ATTRIBUTE, None)
        else:
            module.__dict__[_ATTRIBUTE] = adapter


def _and_wrapped(chunk: nn.Module) -> Iterator[nn.Module]:
    """A module, and what it wraps: a compiled model its own (`_orig_mod`), Megatron's wrappers theirs (`module`)."""
    inner: nn.Module | None = chunk
    while inner is not None:
        yield inner
        inner = next((inner._modules[name] for name in ("_orig_mod", "module") if inner._modules.get(name)), None)


def find_adapter(model: Model) -> LoraAdapter | None:
    """The adapter attached to a model, wrapped or not; None when there is none."""
    for chunk in chunks_of(model):
        for module in chunk.modules():
            if _ATTRIBUTE in module.__dict__:
                return module.__dict__[_ATTRIBUTE]
    return None


def adapter_of(model: Model) -> LoraAdapter:
    """The adapter attached to a model, wrapped or not.

    Raises:
        LoraError: there is none.
    """
    adapter = find_adapter(model)
    if adapter is None:
        raise LoraError("this model", reason="has no adapter attached", cure="call lora_plugins_sdk.attach first")
    return adapter


@contextmanager
def disable_adapters(model: Model) -> Iterator[None]:
    """The base model alone while the context is open.

    Raises:
        LoraError: no adapter is attached.
    """
    with adapter_of(model).disabled():
        yield
