"""The megatron-core hybrid against transformers: logits, with weights copied by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_tiny import CONFIG, TOKENS, VOCABULARY, hf_model, make_checkpoint, tokens
from hybrid_weights import copy_weights
from torch import Tensor

from lora_plugins_sdk import load_plugin
from lora_plugins_sdk.testing import Layout, current_run, run_world

LAYOUTS = [
    Layout(),
    Layout(tp=2, etp=1, sequence_parallel=True),
    Layout(tp=2, etp=2, sequence_parallel=True),
    Layout(dp=2, ep=2),
    Layout(tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
    Layout(pp=2),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hybrid"))


def logits(checkpoint: Path, overrides: dict[str, Any]) -> Tensor:
    run = current_run()
    model = load_plugin(architecture="qwen36_moe").build_model(CONFIG, run, torch.float32, overrides)
    copy_weights(model, hf_model(checkpoint).state_dict(), CONFIG)
    ids = tokens()
    with torch.no_grad():
        return model(ids, torch.arange(TOKENS).expand_as(ids), None)


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_equal_transformers(
    layout: Layout, dispatcher: str, checkpoint: Path, figure: Callable[[str, float], None]
) -> None:
    ranks = run_world(logits, layout, checkpoint, {"moe_token_dispatcher_type": dispatcher})
    with torch.no_grad():
        expected = hf_model(checkpoint)(tokens()).logits
    whole = torch.cat(ranks[-layout.tp :], dim=-1)[..., :VOCABULARY]
    figure(f"{layout} {dispatcher}: logits", (whole - expected).abs().max().item())
    assert (whole - expected).abs().max() <= 1e-5
