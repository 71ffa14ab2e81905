"""A training step through megatron-core's schedules and DDP on a CPU, most of the model frozen, against one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.hosts.gpt import build_gpt, transformer_config
from lora_plugins_sdk.hosts.rope import Rope
from lora_plugins_sdk.hosts.sizes import dense_size_fields
from lora_plugins_sdk.testing import Layout, current_run, run_world

HF = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=20,
    max_position_embeddings=32,
)
LENGTHS = (6, 8, 5, 8)  # tokens of each microbatch
BATCH, LEARNING_RATE = 2, 0.5
TRAINED = ("self_attention.linear_proj.weight", "mlp.linear_fc1.layer_norm_weight")
pytestmark = [pytest.mark.world, pytest.mark.mcore_matrix]

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _name(stage_name: str, first_layer: int) -> str:
    """A parameter's name with the layer counted over the whole model."""
    head, _, tail = stage_name.partition("decoder.layers.")
    if not tail:
        return stage_name
    layer, _, rest = tail.partition(".")
    return f"{head}decoder.layers.{int(layer) + first_layer}.{rest}"


def _step(tied: bool, train_embedding: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    """One SGD step on LENGTHS, dealt out over the DP ranks; the trained weights, their gradients and the losses."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run, dims = current_run(), ModelDims(HF | {"tie_word_embeddings": tied})
    model_fields = dense_size_fields(dims) | dict(
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    config = transformer_config(run, dtype=torch.float64, model=model_fields, overrides=overrides)
    config.finalize_model_grads_func = finalize_model_grads
    model = build_gpt(config, run, dims, rope=Rope(theta=10000.0))
    first_layer = run.pp_rank * HF["num_hidden_layers"] // run.facts.pp
    trained: dict[str, torch.nn.Parameter] = {}
    for stage_name, weight in model.named_parameters():
        name = _name(stage_name, first_layer)
        source = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
        draw = torch.Generator().manual_seed(sum(map(ord, source)) * 131 + len(source))
        values = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
        weight.data.copy_(1 + 0.2 * values if "norm" in name else 0.3 * values)
        is_trained = name.endswith(TRAINED) or (train_embedding and "embedding" in source)
        weight.requires_grad_(is_trained)
        if is_trained:
            trained[name] = weight
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model)
    ddp.zero_grad_buffer()

    draw = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, HF["vocab_size"], (BATCH, length + 1), generator=draw) for length in LENGTHS]
    mine = batches[run.dp_rank :: run.facts.dp]
    losses: list[Tensor] = []

    def forward(data: Iterator[Tensor], stage: torch.nn.Module) -> tuple[Tensor, Any]:
        tokens = next(data)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            losses.append(value.detach().clone())
            return value, {}

        return stage(inputs, positions, None), loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(mine),
        model=[ddp],
        num_microbatches=len(mine),
        seq_length=max(LENGTHS),
        micro_batch_size=BATCH,
        forward_only=False,
    )
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    assert all(weight.grad is None and not hasattr(weight, "main_grad") for weight in frozen)
    gradients = {name: vars(weight)["main_grad"].clone() for name, weight in trained.items()}
    with torch.no_grad():
        for name, weight in trained.items():
            weight -= LEARNING_RATE * gradients[name]
    return {"gradients": gradients, "weights": {n: w.detach() for n, w in trained.items()}, "losses": losses}


def _check(layout: Layout, *, tied: bool = False, train_embedding: bool = False, **overrides: Any) -> None:
    (reference,) = run_world(_step, Layout(), tied, train_embedding, {})
    ranks = run_world(_step, layout, tied, train_embedding, overrides)
    seen: set[str] = set()
    for rank in ranks:
        for kind in ("gradients", "weights"):
            for name, value in rank[kind].items():
                copy = tied and name == "output_layer.weight"  # the last stage's copy of the embedding
                expected = reference[kind]["embedding.word_embeddings.weight" if copy else name]
                torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
                seen.add(name)
    assert seen >= set(reference["weights"])
    assert all(value.abs().max() > 1e-4 for value in reference["gradients"].values())
    losses = sorted(float(loss) for rank in ranks for loss in rank["losses"])
    assert losses == pytest.approx(sorted(map(float, reference["losses"])), rel=1e-12)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2), Layout(pp=2, dp=2)], ids=str)
def test_step_with_few_trained_weights(layout: Layout) -> None:
    _check(layout, variable_seq_lengths=layout.pp > 1)


def test_tied_embedding_trains_on_both_stages() -> None:
    _check(Layout(pp=2), tied=True, train_embedding=True, variable_seq_lengths=True)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_recomputed_activations_give_the_same_step(layout: Layout) -> None:
    _check(layout, train_embedding=True, variable_seq_lengths=layout.pp > 1, **RECOMPUTE)
