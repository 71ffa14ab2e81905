"""A router's linear: megatron-core's own TopKRouter, its logits adapted before the choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdk_hybrid import HF_CONFIG, ROUTER, architecture_of
from torch import Tensor, nn

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    SelectedPlugin,
    adapter_of,
    attach,
    detach,
    disable_adapters,
    reduce_grads,
)
from lora_plugins_sdk.testing import Layout, current_run, run_world

LORA = LoraConfig(rank=2, alpha=4, target_modules=("mlp.gate",))
TOKENS, SAMPLES = 8, 2


def routed_model(dtype: torch.dtype = torch.float32, router_dtype: str | None = None) -> nn.Module:
    """`decoder.layers.0.mlp.router` alone; 3 experts, two chosen."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    run = current_run()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=12,
        num_attention_heads=2,
        add_bias_linear=False,
        num_moe_experts=3,
        moe_router_topk=2,
        moe_router_dtype=router_dtype,  # type: ignore[arg-type]
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=run.facts.tp,
        sequence_parallel=run.facts.sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    model: Any = nn.Module()
    model.decoder, layer = nn.Module(), nn.Module()
    model.decoder.layers, layer.mlp = nn.ModuleList([layer]), nn.Module()
    layer.mlp.router = TopKRouter(config=config, pg_collection=get_default_pg_collection())
    draw = torch.Generator().manual_seed(1)
    layer.mlp.router.weight.data.copy_(torch.randn(3, 12, generator=draw))
    return model


def adapted(model: nn.Module) -> Any:
    """Its router, with factors of their own."""
    attach(model, SelectedPlugin.of(architecture_of(ROUTER)), HF_CONFIG, LORA, current_run())
    draw = torch.Generator().manual_seed(2)
    for parameter in adapter_of(model).parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    return model.get_submodule("decoder.layers.0.mlp.router")


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, SAMPLES, 12, generator=torch.Generator().manual_seed(3)).to(dtype)


def folded(router: Any) -> Tensor:
    return router.weight.detach() + LORA.scale * router.lora.bs[0] @ router.lora.a


def one_process() -> dict[str, bool]:
    """What must hold, by name."""
    model = routed_model()
    router, x = adapted(model), tokens()
    weight = folded(router).detach()
    own = router.weight.detach().clone()
    with torch.no_grad():
        chosen = router(x)[1]
        logits = x @ weight.t()
        with disable_adapters(model):
            base = router(x)[1]
        detach(model)
        bare = router(x)[1]
    right = torch.zeros_like(chosen).scatter(1, logits.flatten(0, 1).topk(2).indices, True)
    return {
        "chosen by the adapted logits": torch.equal(chosen, right),
        "the choice differs from the base's": not torch.equal(chosen, base),
        "disabled is the base": torch.equal(base, bare),
        "detached": "gating" not in vars(router) and not hasattr(router, "lora"),
        "the weight is untouched": torch.equal(router.weight, own),
    }


@pytest.mark.world
def test_the_delta_enters_before_the_choice() -> None:
    (held,) = run_world(one_process, Layout())
    assert len(held) == 5 and all(held.values()), held


def gradients() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, dX and factor gradients of this rank."""
    model, run = routed_model(), current_run()
    router, x = adapted(model), tokens()
    upstream = torch.randn(TOKENS, SAMPLES, 3, generator=torch.Generator().manual_seed(4))
    if run.facts.sequence_parallel:
        x, upstream = x.chunk(run.facts.tp)[run.tp_rank], upstream.chunk(run.facts.tp)[run.tp_rank]
    x = x.clone().requires_grad_(True)
    logits = router.gating(x)
    (logits * upstream).sum().backward()
    reduce_grads(model)
    assert x.grad is not None
    return logits.detach(), x.grad, [p.grad for p in adapter_of(model).parameters() if p.grad is not None]


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_gradients_are_complete_on_every_rank(layout: Layout) -> None:
    """B9: with sequence parallelism each rank routes its own tokens, so both factors are summed over TP."""
    draw = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 12, generator=draw), torch.randn(3, 2, generator=draw)
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    x = tokens().requires_grad_(True)
    for leaf in (a, b):
        leaf.requires_grad_(True)
    logits = x @ (weight + LORA.scale * b @ a).t()
    (logits * torch.randn(TOKENS, SAMPLES, 3, generator=torch.Generator().manual_seed(4))).sum().backward()
    ranks = run_world(gradients, layout)
    split = layout.sequence_parallel
    for index, whole in enumerate((logits.detach(), x.grad)):
        mine = torch.cat([rank[index] for rank in ranks]) if split else ranks[-1][index]
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)
    for _, _, grads in ranks:
        for grad, leaf in zip(grads, (a, b), strict=True):
            torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-4)


def wide() -> dict[str, Any]:
    """A bfloat16 model whose router computes in float32."""
    model = routed_model(torch.bfloat16, "fp32")
    router = adapted(model)
    x = tokens(torch.bfloat16).requires_grad_(True)
    logits = router.gating(x)
    exact = x.detach().float() @ (router.weight.detach().float() + LORA.scale * router.lora.bs[0] @ router.lora.a).t()
    logits.square().sum().backward()
    assert x.grad is not None
    grad = (2 * exact) @ folded(router).float()
    return {
        "dtype": str(logits.dtype),
        "error": ((logits - exact).abs().max() / exact.abs().max()).item(),
        "dX": ((x.grad.float() - grad).abs().max() / grad.abs().max()).item(),
        "dX dtype": str(x.grad.dtype),
    }


@pytest.mark.world
def test_the_branch_computes_in_the_routers_dtype() -> None:
    (seen,) = run_world(wide, Layout())
    assert seen["dtype"] == "torch.float32" and seen["dX dtype"] == "torch.bfloat16"
    assert seen["error"] < 1e-6 and seen["dX"] < 0.01


def test_a_module_without_the_method_is_refused() -> None:
    model: Any = nn.Module()
    model.decoder, layer = nn.Module(), nn.Module()
    model.decoder.layers, layer.mlp = nn.ModuleList([layer]), nn.Module()
    layer.mlp.router = nn.Linear(12, 3, bias=False)
    with pytest.raises(LoraError, match=r"decoder.layers.0.mlp.router: has no method 'gating'"):
        attach(model, SelectedPlugin.of(architecture_of(ROUTER)), HF_CONFIG, LORA)
    assert not hasattr(layer.mlp.router, "lora")
