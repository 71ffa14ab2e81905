"""The megatron-core model against transformers: logits in every kind of layout, and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inkling_tiny import CONFIG, TOKENS, make_model, tokens
from inkling_weights import copy_weights, host_tensors
from torch import Tensor

from lora_plugin_inkling.model.build import build_model
from lora_plugins_sdk.testing import Layout, current_run, run_world

TOLERANCE = 1e-5
VOCABULARY = CONFIG["unpadded_vocab_size"]
LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, ep=2),
    Layout(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True),
]


def _step(hf: dict[str, Tensor], hf_grads: dict[str, Tensor], upstream: Tensor) -> dict[str, Any]:
    """Forward, backward of `(logits * upstream).sum()` and finalize: this rank's logits and its worst gradient."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run = current_run()
    overrides = {"variable_seq_lengths": True} if run.facts.pp > 1 else {}
    model = build_model(CONFIG, run, overrides=overrides)
    copy_weights(model, hf, CONFIG)
    config: Any = model.config
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    ids = tokens()
    seen: list[Tensor] = []
    columns = -(-VOCABULARY // run.facts.tp)
    padded = torch.nn.functional.pad(upstream, (0, columns * run.facts.tp - VOCABULARY))

    def forward(data: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append(logits.detach().clone())
            return (logits * padded.split(columns, dim=-1)[run.tp_rank]).sum(), {}

        return stage(next(data), None, None), loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([ids]),
        model=[ddp],
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=ids.shape[0],
        forward_only=False,
    )
    differences, entries = {}, 0
    expected = host_tensors(model, hf_grads, CONFIG)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mine = parameter.main_grad  # type: ignore[attr-defined]
            scale = max(expected[name].abs().max().item(), 1e-3)
            differences[name] = (mine - expected[name]).abs().max().item() / scale
            entries += mine.numel()
    return {"logits": seen[0] if seen else None, "gradients": differences, "entries": entries}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    model = make_model()
    logits = model(tokens()).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * upstream).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())
    return {"hf": model.state_dict(), "grads": gradients, "upstream": upstream, "logits": logits.detach()}


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_and_every_gradient(
    layout: Layout, reference: dict[str, Any], figure: Callable[[str, float], None]
) -> None:
    ranks = run_world(_step, layout, reference["hf"], reference["grads"], reference["upstream"])
    shards = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    for replica in (shards[start : start + layout.tp] for start in range(0, len(shards), layout.tp)):
        logits = torch.cat(replica, dim=-1)
        assert not logits[..., VOCABULARY:].any(), "padding rows of the output layer are zero"
        difference = (logits[..., :VOCABULARY] - reference["logits"]).abs().max().item()
        figure(f"{layout}: logits", difference)
        assert difference <= TOLERANCE
    if layout == Layout():
        padding = (CONFIG["vocab_size"] - VOCABULARY) * CONFIG["hidden_size"]
        every = sum(gradient.numel() for gradient in reference["grads"].values()) - padding
        assert ranks[0]["entries"] == every, "no parameter of transformers is left out, but the head's padding"
    worst = {name: value for rank in ranks for name, value in rank["gradients"].items()}
    name = max(worst, key=lambda one: worst[one])
    figure(f"{layout}: gradients, relative, worst {name}", worst[name])
    assert worst[name] <= TOLERANCE * 5, sorted(worst.items(), key=lambda one: -one[1])[:8]
