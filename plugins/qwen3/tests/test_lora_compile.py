"""A compiled model trains the same adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_tiny import microbatches, positions
from qwen3_trainer import adapted_model, local, loss_of
from torch import Tensor

from lora_plugins_sdk import adapter_of, disable_adapters
from lora_plugins_sdk.testing import Layout, current_run, run_world


def compiled(checkpoint: Path, adapter: Path, backend: str | None) -> dict[str, Any]:
    """Adapted logits, base logits inside `disable_adapters`, gradients."""
    run = current_run()
    model, attached = adapted_model(checkpoint, adapter, run)
    called: Any = model if backend is None else torch.compile(model, backend=backend)
    assert adapter_of(called) is attached
    tokens = microbatches()[0]
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    def forward() -> Tensor:
        return called(inputs, positions(inputs), None)

    logits = forward()
    loss_of(logits.clone(), labels, run).backward()
    with torch.no_grad(), disable_adapters(called):
        base = forward()
    with torch.no_grad():
        again = forward()
    return {"logits": logits.detach(), "base": base, "again": again, "grads": local(attached, "grad")}


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(
    backend: str, checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an earlier run compiled, on another CPU perhaps, is no part of this one.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (eager,) = run_world(compiled, Layout(), checkpoint, adapter, None)
    (mine,) = run_world(compiled, Layout(), checkpoint, adapter, backend, timeout=850)
    assert (eager["base"] - eager["logits"]).abs().max() > 0.1
    for name in ("logits", "base", "again"):
        assert (mine[name] - eager[name]).abs().max() <= 1e-5, name
    assert mine["grads"].keys() == eager["grads"].keys()
    for factor, grad in eager["grads"].items():
        assert (mine["grads"][factor] - grad).abs().max() <= 1e-6, factor
