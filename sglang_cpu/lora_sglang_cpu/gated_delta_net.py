"""Hybrids with gated delta nets (Qwen3.5-MoE): the Triton kernels of linear attention, and of the gates beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from lora_sglang_cpu.hook import Hook

OPS = "sglang.kernels.ops"
NO_DRIVER = "A Triton kernel, which finds no driver; called in {}."


def keep_convolution_state_exact() -> None:
    """Without: the convolution's state is bfloat16 whatever the model's type is, and decode is off by up to 5e-3."""
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")


def split_projections(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[tokens, q|k|v|z] and [tokens, b|a] to q|k|v [tokens, ..], z [tokens, heads, width], b and a [tokens, heads]."""
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    validate_data: bool = False,
    block_table: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Prefill: each sequence of x [channels, tokens] is convolved and leaves its last tokens in its state's slot."""
    assert cache_indices is not None and has_initial_state is not None
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices[: len(bounds) - 1].tolist()):
        start, end = bounds[row], bounds[row + 1]
        if slot == pad_slot_id or start == end:
            continue
        old = conv_states[slot] if has_initial_state[row] else torch.zeros_like(conv_states[slot])
        out[:, start:end], conv_states[slot] = convolve(x[:, start:end], old, weight, bias, activation)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Decode: one token of each sequence, x [sequences, channels]."""
    assert x.dim() == 2 and conv_state_indices is not None, "speculative decoding has no stand-in on a CPU"
    out = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices[: len(x)].tolist()):
        if slot != pad_slot_id:
            value, conv_state[slot] = convolve(x[row, :, None], conv_state[slot], weight, bias, activation)
            out[row] = value[:, 0]
    return out


def convolve(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: bool | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution of x [channels, tokens] after state [channels, width - 1]; output and new state."""
    assert state.shape[1] == weight.shape[1] - 1, (state.shape, weight.shape)
    window = torch.cat([state.to(x.dtype), x], dim=1)
    out = functional.conv1d(window[None], weight[:, None], bias, groups=len(weight))[0]
    return functional.silu(out) if activation else out, window[:, -state.shape[1] :].to(state.dtype)


def gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and update rate, both [1, tokens, value heads] in fp32."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, None]:
    """Prefill: q and k [1, tokens, key heads, K], v [1, tokens, value heads, V], states [slots, value heads, V, K].

    Returns output [1, tokens, value heads, V]; the third value, the state at chunk ends, serves the prefix cache only.
    """
    assert initial_state is not None and initial_state_indices is not None and cu_seqlens is not None
    assert inplace_update and not head_first
    out = torch.zeros_like(v)
    bounds = cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices[: len(bounds) - 1].tolist()):
        if slot < 0:
            continue
        here = slice(bounds[row], bounds[row + 1])
        out[0, here], initial_state[slot] = delta_rule(
            q[0, here], k[0, here], v[0, here], g[0, here], beta[0, here], initial_state[slot],
            scale=q.shape[-1] ** -0.5 if scale is None else scale, normalise=use_qk_l2norm_in_kernel,
        )  # fmt: skip
    return out, None, None


def packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode: one token of each sequence, mixed_qkv [sequences, q|k|v], into out [sequences, 1, value heads, V]."""
    heads, v_dim, k_dim = initial_state.shape[-3:]
    keys = (mixed_qkv.shape[1] - heads * v_dim) // 2
    q, k, v = mixed_qkv.split([keys, keys, heads * v_dim], dim=-1)
    decay, rate = gating(A_log, a, b, dt_bias)
    out.zero_()
    for row, slot in enumerate(ssm_state_indices.tolist()):
        if slot >= 0:
            out[row], initial_state[slot] = delta_rule(
                q[row].view(1, -1, k_dim), k[row].view(1, -1, k_dim), v[row].view(1, heads, v_dim),
                decay[0, row, None], rate[0, row, None], initial_state[slot],
                scale=scale, normalise=use_qk_l2norm_in_kernel,
            )  # fmt: skip
    return out, initial_state


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule of one sequence, token by token, in fp32; the outputs and the state after the last token.

    S <- exp(g) S;  S <- S + beta (v - S k) k^T;  o = S q, with S [heads, V, K] (Yang et al., arXiv:2412.06464).
    """
    q, k, v, state = q.float(), k.float(), v.float(), state.float()
    if normalise:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * scale, k))
    outputs = []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        error = (v[t] - (state * k[t, :, None]).sum(-1)) * rate[t, :, None]
        state = state + error[:, :, None] * k[t, :, None]
        outputs.append((state * q[t, :, None]).sum(-1))
    return torch.stack(outputs), state


def rms_norm_gated(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """RMS norm of x over its last dimension, times the gate silu(z)."""
    if bias is not None or not (is_rms_norm and norm_before_gate) or group_size not in (None, x.shape[-1]):
        raise NotImplementedError("a gated norm of another kind than Qwen3.5's has no stand-in on a CPU")
    if activation not in ("swish", "silu"):
        raise NotImplementedError(f"a norm's gate of kind {activation!r} has no stand-in on a CPU")
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    if z is not None:
        normed = normed * functional.silu(z.reshape(x.shape).float())
    return normed.to(x.dtype)


def sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """The attention's output gate."""
    assert not quant
    gated = attn_output * gate.reshape(attn_output.shape).sigmoid()
    return attn_output.copy_(gated) if inplace else gated


def add_gated_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the shared expert's output, gated by a sigmoid, to that of the routed experts."""
    final_hidden_states += gated_shared_expert(hidden_states, gate_weight, shared_output)


def gated_shared_expert(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor
) -> torch.Tensor:
    """The shared expert's output times its gate."""
    return (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output


def get_hidden_dim(
    original: Callable[..., Any],
    module_name: str,
    config: Any,
    base_model: Any,
    layer_idx: int,
    lora_added_vocab_size: int = 0,
) -> Any:
    """Width in and out of a module, asked of the body where only that knows."""
    body = getattr(base_model, "model", None)
    knows = body if hasattr(body, "get_hidden_dim") and not hasattr(base_model, "get_hidden_dim") else base_model
    return original(module_name, config, knows, layer_idx, lora_added_vocab_size)


HOOKS = (
    Hook(
        f"{OPS}.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
        "(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)",
        NO_DRIVER.format("the input projections"),
        split_projections,
    ),
    Hook(
        f"{OPS}.mamba.causal_conv1d_triton.causal_conv1d_fn",
        "(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None, has_initial_state=None, "
        "activation='silu', pad_slot_id=-1, validate_data=False, block_table=None, **kwargs)",
        NO_DRIVER.format("prefill"),
        causal_conv1d_fn,
    ),
    Hook(
        f"{OPS}.mamba.causal_conv1d_triton.causal_conv1d_update",
        "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, "
        "num_accept_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None, "
        "retrieve_next_token=None, retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, "
        "metadata=None, validate_data=False)",
        NO_DRIVER.format("decode"),
        causal_conv1d_update,
    ),
    Hook(
        f"{OPS}.attention.linear.fused_gdn_gating.fused_gdn_gating",
        "(A_log, a, b, dt_bias, beta=1.0, threshold=20.0)",
        NO_DRIVER.format("prefill"),
        gating,
    ),
    Hook(
        f"{OPS}.attention.fla.chunk.chunk_gated_delta_rule",
        "(q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None, "
        "head_first=False, use_qk_l2norm_in_kernel=False, inplace_update=True)",
        "Refuses fp32, and is Triton in bfloat16; called in prefill.",
        chunk_gated_delta_rule,
    ),
    Hook(
        f"{OPS}.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        "(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
        "use_qk_l2norm_in_kernel=False)",
        NO_DRIVER.format("decode"),
        packed_decode,
    ),
    Hook(
        f"{OPS}.attention.fla.layernorm_gated.rms_norm_gated",
        "(*, x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True, is_rms_norm=False, "
        "activation='swish')",
        "Asks CUDA for the current device; called after every gated delta net.",
        rms_norm_gated,
    ),
    Hook(
        f"{OPS}.elementwise.elementwise.fused_sigmoid_mul",
        "(attn_output, gate, inplace=False, quant=False)",
        NO_DRIVER.format("full attention with an output gate"),
        sigmoid_mul,
    ),
    Hook(
        f"{OPS}.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        "(hidden_states, gate_weight, shared_output, final_hidden_states)",
        NO_DRIVER.format("the shared expert"),
        add_gated_shared_expert,
    ),
    Hook(
        "sglang.srt.lora.utils.get_hidden_dim",
        "(module_name, config, base_model, layer_idx, lora_added_vocab_size=0)",
        "The text-only wrapper does not answer for its body: adapters on `in_proj_qkvz` stop the start-up.",
        get_hidden_dim,
        around=True,
    ),
)
