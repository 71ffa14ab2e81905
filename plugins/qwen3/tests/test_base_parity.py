"""The megatron-core base against transformers: logits and the gradient that reaches the embedding's output."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from lora_plugins_sdk import load_base_weights, load_plugin, read_hf_config
from lora_plugins_sdk.testing import Layout, current_run, run_world

TOLERANCE = 1e-5
VOCABULARY, BATCH, TOKENS = 301, 2, 24  # an odd vocabulary: padded under TP2
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)]
MORE_LAYOUTS = [Layout(dp=2), Layout(tp=2, pp=2, sequence_parallel=True)]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A checkpoint and what transformers computes from it; the batch holds one row of samples per DP rank."""

    directory: Path
    tokens: Tensor
    upstream: Tensor
    logits: Tensor
    d_embedded: Tensor


def _make_base(directory: Path, tied: bool) -> Base:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is mixed up or left out
                weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(directory)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS))
    embedded = model.get_input_embeddings()(tokens.flatten(0, 1)).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedded).logits
    upstream = torch.randn_like(logits)
    (d_embedded,) = torch.autograd.grad(logits, embedded, upstream)

    def by_rank(value: Tensor) -> Tensor:
        return value.detach().unflatten(0, (2, BATCH))

    return Base(
        directory=directory,
        tokens=tokens,
        upstream=by_rank(upstream),
        logits=by_rank(logits),
        d_embedded=by_rank(d_embedded),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return _make_base(tmp_path_factory.mktemp("qwen3"), request.param)


def _forward_and_backward(directory: Path, tokens: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Through megatron-core's schedule, every weight frozen: this rank's logits and dX of the embedding's output."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run, plugin = current_run(), load_plugin("qwen3")
    model = plugin.build_model(read_hf_config(directory), run, torch.float32)
    load_base_weights(model, plugin, directory, run)
    model.requires_grad_(False)
    result: dict[str, Any] = {"logits": None, "d_embedded": None}

    def start_of_graph(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        result["embedded"] = output.detach().requires_grad_(True)
        return result["embedded"]

    if run.pp_rank == 0:
        model.get_submodule("embedding").register_forward_hook(start_of_graph)
    mine = tokens[run.dp_rank]
    columns = -(-VOCABULARY // run.facts.tp)
    padded = torch.nn.functional.pad(upstream[run.dp_rank], (0, columns * run.facts.tp - VOCABULARY))

    def forward(data: Iterator[Tensor], stage: torch.nn.Module) -> tuple[Tensor, Any]:
        ids = next(data)

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            result["logits"] = logits.detach()
            return (logits * padded.split(columns, dim=-1)[run.tp_rank]).sum(), {}

        return stage(ids, torch.arange(TOKENS).expand_as(ids), None), loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([mine]),
        model=[model],
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    assert all(weight.grad is None for weight in model.parameters())
    if "embedded" in result:
        result["d_embedded"] = result.pop("embedded").grad  # [s, b, hidden]; SP: this rank's tokens
    return result | {"dp_rank": run.dp_rank, "tp_rank": run.tp_rank}


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS + MORE_LAYOUTS, ids=str)
def test_logits_and_dx_equal_transformers(base: Base, layout: Layout) -> None:
    ranks = run_world(_forward_and_backward, layout, base.directory, base.tokens, base.upstream)
    for dp_rank in range(layout.dp):
        mine = [rank for rank in ranks if rank["dp_rank"] == dp_rank]
        logits = torch.cat([rank["logits"] for rank in mine if rank["logits"] is not None], dim=-1)
        _assert_close(logits[..., :VOCABULARY], base.logits[dp_rank], TOLERANCE)
        assert not logits[..., VOCABULARY:].any(), "padding rows of the output layer are zero"
        parts = [rank["d_embedded"] for rank in mine if rank["d_embedded"] is not None]
        assert len(parts) == layout.tp
        whole = [torch.cat(parts)] if layout.sequence_parallel else parts
        for d_embedded in whole:
            expected = base.d_embedded[dp_rank]
            _assert_close(d_embedded.transpose(0, 1), expected, TOLERANCE * expected.abs().max().item())


def _assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference <= tolerance, f"{difference} > {tolerance}"
