"""The input of recomputed layers requires a gradient, whatever the stack is called and however it is called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from known_faults.stack_host import StackModel, adapted


class Multimodal(nn.Module):
    """Holds the language model under a name of its own, and calls it with keyword arguments."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.language_model = StackModel(recompute=recompute)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.language_model.decoder(hidden_states=self.language_model.embedding(tokens))


@pytest.mark.parametrize("host", [StackModel, Multimodal])
def test_every_factor_trains(host: type[nn.Module]) -> None:
    """B20, B19: a hook that knows classes by name missed the model's, and the gradient norm was 0.0."""
    grads: list[list[Tensor | None]] = []
    for recompute in (False, True):
        model = host(recompute=recompute)
        adapter = adapted(model)
        out = model(torch.arange(5))
        assert out.requires_grad
        (out * torch.linspace(1, 2, 8)).sum().backward()
        grads.append([parameter.grad for parameter in adapter.parameters()])
    plain, recomputed = grads
    assert len(plain) == 6
    for expected, found in zip(plain, recomputed, strict=True):
        assert expected is not None and found is not None and expected.abs().max() > 1e-3
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
