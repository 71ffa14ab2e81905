"""The place of one adapter in a HF model, filled by real PEFT and checked tensor by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any

_SHOWN = 5


class PeftSlot:
    """Wraps a HF model with PEFT on the first adapter and refills the same factors afterwards.

    Args:
        base: the HF model, without an adapter.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._peft: Any = None
        self._config: dict[str, Any] | None = None

    @property
    def model(self) -> Any:
        """The model to run: the base until an adapter is filled in."""
        return self._base if self._peft is None else self._peft

    def fill(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Make `tensors` the adapter. Nothing changes when this raises.

        Raises:
            LoraError: config PEFT does not know, another config than the first one, or tensors that do not
                fit it.
        """
        if self._peft is None:
            self._fill_first(tensors, config)
            return
        if dict(config) != self._config:
            raise LoraError(
                "adapter config",
                reason=f"differs from the first adapter's in {_changed_keys(self._config or {}, config)}",
                cure="keep one adapter config per engine, or open a new engine",
            )
        check_fit(adapter_state(self._peft), tensors)
        _write(self._peft, tensors)

    def _fill_first(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        peft_config = lora_config(config)
        from peft import get_peft_model

        try:
            with without_false_alarms():
                wrapped = get_peft_model(self._base, peft_config)
        except ValueError as error:
            raise LoraError(
                "adapter config",
                reason=f"PEFT refuses it: {error}",
                cure="target modules that this model has",
            ) from error
        try:
            check_fit(adapter_state(wrapped), tensors)
        except LoraError:
            self._base = wrapped.unload()
            raise
        _write(wrapped, tensors)
        self._peft = wrapped.eval().requires_grad_(False)
        self._config = dict(config)


@contextmanager
def without_false_alarms() -> Iterator[None]:
    """PEFT looks for ranks and alphas of single weights among modules only, and warns of those of parameters, which it
    uses all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
        yield


def lora_config(config: Mapping[str, Any]) -> Any:
    """PEFT's config object of an `adapter_config.json`; keys that it does not know are refused, not dropped."""
    from peft import LoraConfig

    if config.get("peft_type") != "LORA":
        raise LoraError(
            "adapter config",
            reason=f"peft_type is {config.get('peft_type')!r}",
            cure="write peft_type = 'LORA'",
        )
    unknown = sorted(set(config) - {one.name for one in fields(LoraConfig)})
    if unknown:
        raise LoraError(
            "adapter config",
            reason=f"this PEFT knows no key {unknown}",
            cure="leave the keys out, or install the PEFT version that wrote them",
        )
    return LoraConfig(**config)


def adapter_state(peft_model: Any) -> dict[str, Tensor]:
    """The adapter that a PEFT model holds now, by the names of `adapter_model.safetensors`."""
    from peft import get_peft_model_state_dict

    # "auto" would add embeddings, and ask the hub for the base model's config.
    return get_peft_model_state_dict(peft_model, save_embedding_layers=False)


def check_fit(slots: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse `tensors` unless their names and shapes are those of `slots`, and all are finite.

    Raises:
        LoraError: lists the tensors that are missing, unexpected, misshapen or not finite.
    """
    found = [
        Diagnostic(subject=name, reason="missing from the adapter", cure="export every targeted projection")
        for name in sorted(slots.keys() - tensors.keys())[:_SHOWN]
    ]
    found += [
        Diagnostic(
            subject=name,
            reason="the model with this adapter config has no such factor",
            cure="name it in target_modules, or leave the tensor out",
        )
        for name in sorted(tensors.keys() - slots.keys())[:_SHOWN]
    ]
    for name in sorted(slots.keys() & tensors.keys()):
        want, have = tuple(slots[name].shape), tuple(tensors[name].shape)
        if want != have:
            found.append(
                Diagnostic(
                    subject=name,
                    reason=f"shape is {have}, the model and the config's rank ask for {want}",
                    cure="export A as [rank, in] and B as [out, rank] with the rank of the adapter config",
                )
            )
        elif not bool(torch.isfinite(tensors[name]).all()):
            found.append(Diagnostic(subject=name, reason="holds NaN or infinity", cure="lower the learning rate"))
    raise_if_any(f"adapter refused ({len(tensors)} tensors given, {len(slots)} expected)", found)


def _write(peft_model: Any, tensors: Mapping[str, Tensor]) -> None:
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(peft_model, dict(tensors))
    assert not result.unexpected_keys, result.unexpected_keys
    # PEFT loads non-strictly: read back what it holds now, so that a tensor it passed over cannot go unseen.
    for name, held in adapter_state(peft_model).items():
        given = tensors[name].detach().to(device=held.device, dtype=held.dtype)
        assert torch.equal(held, given), f"PEFT did not take {name}"


def _changed_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
