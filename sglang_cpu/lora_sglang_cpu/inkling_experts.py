"""Inkling's router and experts, and adapters on the experts that are shared."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from lora_sglang_cpu.hook import Hook
from lora_sglang_cpu.inkling import COMMON, NO_DRIVER, OPS
from lora_sglang_cpu.moe_lora import factors

COMPILED = "Compiled on its first call, which takes a C++ compiler and its time; called in {}."
_SHARED = f"{COMMON}.dense_mlp.InklingBatchDenseMLP"
_SHARED_LORA = f"{COMMON}.lora.InklingBatchDenseMLPWithLoRA"
_FORWARD = "(self, x_td, gammas_ts, linearized_weights, use_reduce_scatter)"


def router_logits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32."""
    return a.float() @ b.float()


def choose(
    x: torch.Tensor, k: int, *, return_values: bool = True, _impl: str = "streaming"
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """The k largest of each row, and where they are; of equal ones the first."""
    values, where = x.sort(dim=-1, descending=True, stable=True)
    chosen = where[:, :k].int().contiguous()
    return (values[:, :k], chosen) if return_values else chosen


def routed_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_weight_E_2f_D: torch.Tensor,
    w2_weight_EDf: torch.Tensor,
    w13_bias_E_2f: torch.Tensor | None = None,
    w2_bias_ED: torch.Tensor | None = None,
    activation_type: str = "silu_and_mul",
    use_interleaved: bool = True,
) -> torch.Tensor:
    """Weighted sum of each token's experts [tokens, hidden], without adapters."""
    assert w13_bias_E_2f is None and w2_bias_ED is None and activation_type == "silu_and_mul"
    gated = swiglu if use_interleaved else swiglu_halves
    output = torch.zeros_like(hidden_states)
    for expert in topk_ids.unique().tolist():
        if expert < 0:  # a dropped route
            continue
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        inner = gated(functional.linear(hidden_states[tokens], w13_weight_E_2f_D[expert]))
        weights = topk_weights[tokens, choices, None].to(inner.dtype)
        output.index_add_(0, tokens, functional.linear(inner, w2_weight_EDf[expert]) * weights)
    return output


def swiglu(z_btn: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in turn along the last dimension."""
    z = z_btn.float()
    return (functional.silu(z[..., ::2]) * z[..., 1::2]).to(z_btn.dtype)


def swiglu_halves(z_btn: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, one after the other along the last dimension."""
    gate, up = z_btn.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(z_btn.dtype)


def shared_experts(
    self: Any,
    x_td: torch.Tensor,
    gammas_ts: torch.Tensor,
    linearized_weights: tuple[torch.Tensor, torch.Tensor],
    use_reduce_scatter: bool,
) -> torch.Tensor:
    """`InklingBatchDenseMLP._forward_bf16_linearized`, with adapters or without: every shared expert of every token
    x [tokens, hidden], weighted by gammas [tokens, experts]; gate and up lie in turn in the base's weights."""
    assert use_reduce_scatter, "the layer adds routed and shared experts before any sum over ranks"
    w13, w2 = linearized_weights
    both = functional.linear(x_td, w13).view(len(x_td), self.n_shared_experts, -1, 2)
    gate, up = both.unbind(-1)
    adapted = list(rows_of_slots(self)) if getattr(self, "set_lora", False) else []
    for slot, rows in adapted:
        for expert in range(self.n_shared_experts):
            a, b = factors(self.gate_up_lora_a_weights, self.gate_up_lora_b_weights, slot, expert)
            a_gate, a_up = a.chunk(2)
            b_gate, b_up = b.chunk(2)
            gate[rows, expert] += x_td[rows] @ a_gate.T @ b_gate.T
            up[rows, expert] += x_td[rows] @ a_up.T @ b_up.T
    inner = functional.silu(gate) * up * gammas_ts[..., None].to(gate.dtype)
    out = inner.flatten(1) @ w2
    for slot, rows in adapted:
        for expert in range(self.n_shared_experts):
            a, b = factors(self.down_lora_a_weights, self.down_lora_b_weights, slot, expert)
            out[rows] += inner[rows, expert] @ a.T @ b.T
    return out


def rows_of_slots(layer: Any) -> list[tuple[int, torch.Tensor]]:
    """The adapter slots of this batch, each with its tokens."""
    mapping = layer.lora_backend.batch_info.moe_lora_info.token_lora_mapping
    return [(slot, (mapping == slot).nonzero().flatten()) for slot in mapping.unique().tolist() if slot >= 0]


def initialize_lora(original: Callable[..., None], layer: Any, lora_backend: Any) -> None:
    """SGLang's own, which several slots would be too many for without Triton."""
    one_slot = types.SimpleNamespace(max_loras_per_batch=1, name=lora_backend.name)
    original(layer, one_slot)
    layer.lora_backend = lora_backend
    lora_backend.is_moe_lora = one_slot.is_moe_lora


HOOKS = (
    Hook(
        f"{COMMON}.moe._mm_fp32",
        "(a, b)",
        "Asks torch for fp32 out of other types, which it has for GPUs only; called in the router.",
        router_logits,
    ),
    Hook(
        f"{OPS}.moe.gate_topk.gate_topk",
        "(x, k, *, return_values=True, _impl='streaming')",
        NO_DRIVER.format("the router"),
        choose,
    ),
    Hook(
        f"{COMMON}.moe.moe_tp_forward",
        "(hidden_states, topk_weights, topk_ids, w13_weight_E_2f_D, w2_weight_EDf, w13_bias_E_2f=None, "
        "w2_bias_ED=None, activation_type='silu_and_mul', use_interleaved=True)",
        NO_DRIVER.format("routed experts of an engine without adapters"),
        routed_experts,
    ),
    Hook(f"{COMMON}.dense_mlp.swiglu", "(z_btn)", COMPILED.format("dense layers"), swiglu),
    Hook(
        f"{COMMON}.dense_mlp.swiglu_contiguous",
        "(z_btn)",
        COMPILED.format("dense layers of an engine with adapters"),
        swiglu_halves,
    ),
    Hook(
        f"{_SHARED}._forward_bf16_linearized",
        _FORWARD,
        "Its activation is a Triton kernel that asks for the GPU's processors; called in every layer with experts.",
        shared_experts,
    ),
    Hook(
        f"{_SHARED_LORA}.initialize_lora",
        "(self, lora_backend)",
        "Refuses more than one slot for adapters on shared experts without Triton, and the base takes one.",
        initialize_lora,
        around=True,
    ),
    Hook(
        f"{_SHARED_LORA}._forward_bf16_linearized",
        _FORWARD,
        "Several slots are Triton kernels on CUDA.",
        shared_experts,
    ),
)
