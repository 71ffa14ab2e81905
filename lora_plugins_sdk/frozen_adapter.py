"""A frozen copy of an adapter, to compute with in place of the one in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lora_plugins_sdk.adapter import Model, adapter_of


class FrozenAdapter:
    """The factors as they were when this was made, on this rank.

    A run that starts from an adapter (SFT, then RL) has that adapter as its reference policy, not the bare base that
    `disable_adapters` gives.

    Args:
        model: the model an adapter is attached to.

    Raises:
        LoraError: no adapter is attached.
    """

    def __init__(self, model: Model) -> None:
        self._adapter = adapter_of(model)
        self._values = [parameter.detach().clone() for parameter in self._adapter.parameters()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model computes with the frozen factors while the context is open; for forward passes without
        gradients.

        The parameters get their own storage back, so no value is ever rounded or copied.
        """
        parameters = self._adapter.parameters()
        live = [parameter.data for parameter in parameters]
        try:
            _point(parameters, self._values)
            yield
        finally:
            _point(parameters, live)


def _point(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
