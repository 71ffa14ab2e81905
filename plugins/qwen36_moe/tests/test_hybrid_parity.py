"""The megatron-core hybrid against transformers: logits and dX of the embedding's output, weights copied by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_tiny import BATCH, CONFIG, TOKENS, VOCABULARY, hf_model, make_checkpoint, tokens
from hybrid_weights import copy_weights
from torch import Tensor

from lora_plugins_sdk import load_plugin
from lora_plugins_sdk.testing import Layout, current_run, run_world

TOLERANCE = 1e-5
LAYOUTS = [
    Layout(),
    Layout(tp=2, etp=1, sequence_parallel=True),
    Layout(tp=2, etp=2, sequence_parallel=True),
    Layout(dp=2, ep=2),
    Layout(tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A checkpoint and what transformers computes from it."""

    directory: Path
    upstream: Tensor
    logits: Tensor
    d_embedded: Tensor


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(make_checkpoint(tmp_path_factory.mktemp("hybrid")))


def make_base(directory: Path) -> Base:
    model = hf_model(directory)
    embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedded).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)) / TOKENS
    (d_embedded,) = torch.autograd.grad(logits, embedded, upstream)
    return Base(directory=directory, upstream=upstream, logits=logits.detach(), d_embedded=d_embedded)


def forward_and_backward(
    directory: Path, upstream: Tensor, config: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Tensor]:
    """This rank's logits and dX, every weight frozen; data parallel ranks have different samples."""
    run = current_run()
    model: Any = load_plugin(architecture="qwen36_moe").build_model(config, run, torch.float32, overrides)
    copy_weights(model, hf_model(directory).state_dict(), config)
    model.requires_grad_(False)
    embedded: list[Tensor] = []

    def start_of_graph(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_(True))
        return embedded[0]

    model.embedding.register_forward_hook(start_of_graph)
    ids = tokens().chunk(run.facts.dp)[run.dp_rank]
    logits = model(ids, torch.arange(TOKENS).expand_as(ids), None)
    columns = logits.shape[-1]
    padded = torch.nn.functional.pad(upstream, (0, columns * run.facts.tp - VOCABULARY))
    mine = padded.chunk(run.facts.dp)[run.dp_rank].split(columns, dim=-1)[run.tp_rank]
    (d_embedded,) = torch.autograd.grad(logits, embedded, mine)
    return {"logits": logits.detach(), "d_embedded": d_embedded}


@pytest.fixture(scope="module")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Every router scores its experts in equal pairs, with the border of the chosen ones within a pair."""
    directory = make_checkpoint(tmp_path_factory.mktemp("tied"), num_experts_per_tok=3)
    model = hf_model(directory)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.data[1::2] = weight.data[::2]
    model.save_pretrained(directory)
    return make_base(directory)


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_and_dx_equal_transformers(
    layout: Layout, dispatcher: str, base: Base, figure: Callable[[str, float], None]
) -> None:
    compare(layout, CONFIG, base, {"moe_token_dispatcher_type": dispatcher}, figure)


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2, etp=1, sequence_parallel=True)], ids=str)
def test_tied_experts_are_chosen_as_transformers_chooses(
    layout: Layout, tied_base: Base, base: Base, figure: Callable[[str, float], None]
) -> None:
    """Equal scores occur with equal router rows and in low precision. Another choice would be another policy."""
    assert (tied_base.logits - base.logits).abs().max() > 1e-2
    compare(layout, {**CONFIG, "num_experts_per_tok": 3}, tied_base, {}, figure)


def compare(
    layout: Layout,
    config: dict[str, Any],
    base: Base,
    overrides: dict[str, Any],
    figure: Callable[[str, float], None],
) -> None:
    """Every rank's share of logits and dX against transformers."""
    ranks = run_world(forward_and_backward, layout, base.directory, base.upstream, config, overrides)
    for dp in range(layout.dp):
        mine = ranks[dp * layout.tp : (dp + 1) * layout.tp]
        samples = slice(dp * BATCH // layout.dp, (dp + 1) * BATCH // layout.dp)
        logits = torch.cat([rank["logits"] for rank in mine], dim=-1)[..., :VOCABULARY]
        d_embedded = torch.cat([rank["d_embedded"] for rank in mine]).transpose(0, 1)
        for name, got, whole in (("logits", logits, base.logits), ("dX", d_embedded, base.d_embedded)):
            expected = whole[samples]
            difference = (got - expected).abs().max().item()
            figure(f"{layout} {' '.join(map(str, overrides.values()))}: {name}", difference)
            assert difference <= TOLERANCE * max(1.0, expected.abs().max().item())
