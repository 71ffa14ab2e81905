"""Inkling: short convolutions and attention with relative biases. Its experts are in `inkling_experts`."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lora_sglang_cpu.hook import Hook

COMMON = "sglang.srt.models.inkling_common"
OPS = "sglang.kernels.ops"
NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
NO_DRIVER = "A Triton kernel, which finds no driver; called in {}."
_FLASH_ATTENTION = "sglang.kernels.ops.attention.flash_attn"


def make_importable() -> None:
    """Without: the model asks FlashAttention 4 for a flag, and that package imports CUTLASS, which a CPU has not."""
    package = f"{_FLASH_ATTENTION}.cute"
    if importlib.util.find_spec("cutlass") is not None or package in sys.modules:
        return
    try:
        parent = importlib.util.find_spec(_FLASH_ATTENTION)
    except ModuleNotFoundError:
        parent = None
    if parent is None or not parent.submodule_search_locations:
        return  # another SGLang, which the check of the hooks refuses; SGLang would forget any other exception
    bare = types.ModuleType(package)  # its modules can be imported, its own contents are left out
    bare.__path__ = [os.path.join(parent.submodule_search_locations[0], "cute")]
    sys.modules[package] = bare


# --- start-up --------------------------------------------------------------------------------------------------------


def accept_snapshots(
    original: Callable[..., None], view: Any, hf_config: Any, *, mamba_cache_chunk_size_of: Callable[[], int | None]
) -> None:
    """Let Inkling keep snapshots of its convolutions in the prefix cache: here they are plain copies."""
    if not hf_config.architectures[0].startswith("Inkling"):
        original(view, hf_config, mamba_cache_chunk_size_of=mamba_cache_chunk_size_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactState:
    """Types of a layer's states, fp32 whatever is asked for."""

    conv: torch.dtype = torch.float32
    temporal: torch.dtype = torch.float32


def exact_state(*, conv: torch.dtype = torch.bfloat16, temporal: torch.dtype = torch.bfloat16) -> ExactState:
    """Stand-in for `InklingStateDType`."""
    return ExactState()


def without_chats(original: Callable[..., Any], ctx: Any) -> Any:
    """None for a server of token ids, as SGLang has it for others."""
    return None if ctx.chat_encoding_spec == "inkling" and ctx.tokenizer is None else original(ctx)


def score_mod_backend(forward_batch: Any) -> str:
    """The kind of backend that takes the relative bias as a score mod, as `attend` does."""
    return "triton"


# --- short convolutions ----------------------------------------------------------------------------------------------


def decode_metadata(
    B: int, cache_indices: torch.Tensor, out: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What decode tells each convolution: every sequence is one token long and has a state."""
    assert out is None, "buffers of a CUDA graph"
    starts = torch.arange(B + 1)
    valid = cache_indices != -1
    tables = {"cache_mask": valid.view(B, 1, 1), "safe_idx": cache_indices.clamp(min=0).long(), "cu": starts}
    tables["si"] = starts[:B].int()
    return starts.int(), torch.ones(B, dtype=torch.bool), tables


def state_slots(
    *,
    req_pool_indices: torch.Tensor,
    mamba_index_mapping: torch.Tensor,
    out_state_indices: torch.Tensor,
    valid_bs: int,
    total_bs: int,
    v2p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each request's slot of states [total_bs]; rows from `valid_bs` on are padding and get -1."""
    slots = mamba_index_mapping[req_pool_indices[:valid_bs].long()].long()
    out_state_indices[:valid_bs] = slots if v2p is None else v2p[slots]
    out_state_indices[valid_bs:total_bs] = -1
    req_pool_indices[valid_bs:total_bs] = 0
    return out_state_indices[:total_bs]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    sconv_cache: torch.Tensor,
    cache_mask: torch.Tensor,
    safe_idx: torch.Tensor,
    cu: torch.Tensor,
    si: torch.Tensor,
    activation: str | None = None,
    use_residual: bool = True,
    is_decode: bool = False,
) -> torch.Tensor:
    """Prefill: x [tokens, channels] after each sequence's state [width - 1, channels]; the states stay."""
    out = torch.zeros_like(x)
    bounds, known = cu.tolist(), cache_mask.view(-1).tolist()
    for row, slot in enumerate(safe_idx.tolist()):
        here = slice(bounds[row], bounds[row + 1])
        state = sconv_cache[slot] * known[row]
        out[here] = convolve(x[here], state, weight, activation, use_residual)
    return out


def update_sconv_cache(
    x: torch.Tensor,
    sconv_cache: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """Prefill: each sequence leaves its last inputs in its state's slot."""
    bounds, known = query_start_loc.tolist(), has_initial_state.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        if slot >= 0:
            seen = torch.cat([sconv_cache[slot] * known[row], x[bounds[row] : bounds[row + 1]]])
            sconv_cache[slot] = seen[-sconv_cache.shape[1] :]


def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    sconv_cache: torch.Tensor,
    cache_indices: torch.Tensor,
    cache_mask: torch.Tensor,
    activation: str | None = None,
    use_residual: bool = True,
    track_mask: torch.Tensor | None = None,
    track_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode: one token of each sequence, x [sequences, channels]; moves the states on and takes snapshots of them."""
    out = torch.zeros_like(x)
    known = cache_mask.view(-1).tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        if slot < 0:
            continue
        state = sconv_cache[slot] * known[row]
        out[row] = convolve(x[row, None], state, weight, activation, use_residual)[0]
        sconv_cache[slot] = torch.cat([state[1:], x[row, None]])
        if track_mask is not None and track_indices is not None and track_mask.view(-1)[row]:
            sconv_cache[track_indices[row]] = sconv_cache[slot]
    return out


def take_snapshots(
    hidden_states: torch.Tensor,
    sconv_cache: torch.Tensor,
    track_conv_indices: torch.Tensor,
    mask: torch.Tensor,
    dst_indices: torch.Tensor,
) -> None:
    """Prefill: the inputs `track_conv_indices` [sequences, width - 1] before a boundary, for the prefix cache."""
    for row in mask.nonzero().flatten().tolist():
        sconv_cache[dst_indices[row]] = hidden_states[track_conv_indices[row].long()].to(sconv_cache.dtype)


def convolve(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, activation: str | None, residual: bool
) -> torch.Tensor:
    """Depthwise convolution of x [tokens, channels] after state [width - 1, channels]; weight [channels, width]."""
    window = torch.cat([state.to(x.dtype), x])
    out = functional.conv1d(window.T[None], weight[:, None], groups=len(weight))[0].T
    out = functional.silu(out) if activation else out
    return out + x if residual else out


# --- attention -------------------------------------------------------------------------------------------------------


def extend_attention(original: Callable[..., Any], backend: Any, *args: Any, **more: Any) -> Any:
    """Prefill: SGLang's own attention, or ours where a layer has a relative bias."""
    if "score_mod" not in more:
        return original(backend, *args, **more)
    batch = args[4]
    lengths = zip(batch.extend_seq_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    return biased_attention(backend, *args, queries=list(lengths), **more)


def decode_attention(original: Callable[..., Any], backend: Any, *args: Any, **more: Any) -> Any:
    """Decode: one query of each sequence."""
    if "score_mod" not in more:
        return original(backend, *args, **more)
    return biased_attention(backend, *args, queries=[(1, length) for length in args[4].seq_lens.tolist()], **more)


def biased_attention(
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *,
    queries: list[tuple[int, int]],
    score_mod: Any,
    aux_tensors: list[torch.Tensor],
) -> torch.Tensor:
    """Attention with `aux_tensors[0]` [tokens, heads, extent]: what a query adds to the score of the key that is so
    many tokens before it.

    Args:
        queries: per sequence, the tokens of q and the tokens of keys; q has the last ones.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out, first = torch.empty_like(q), 0
    for row, (count, length) in enumerate(queries):
        here = slice(first, first + count)
        first += count
        slots = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[row], :length].long()
        if window >= 0 and backend.use_sliding_window_kv_pool:
            slots = pool.translate_loc_from_full_to_swa(slots)
        out[here] = attend(q[here], keys[slots], values[slots], aux_tensors[0][here], layer.scaling, window)
    return out.view(len(out), -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """One sequence: q [queries, heads, width] are the last of k and v [tokens, groups, width]; `window` tokens back
    are seen, all if it is negative."""
    group, extent = q.shape[1] // k.shape[1], bias.shape[-1]
    k, v = (one.to(q.dtype).repeat_interleave(group, dim=1) for one in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((distance <= window) if window >= 0 else True)
    near = distance.clamp(0, extent - 1)[:, None].expand(-1, q.shape[1], -1)
    added = bias.gather(2, near).where((distance < extent)[:, None], 0)
    scores = torch.einsum("qhd,khd->qhk", q, k) * scale + added
    weights = scores.where(seen[:, None], float("-inf")).float().softmax(-1).to(v.dtype)
    return torch.einsum("qhk,khd->qhd", weights, v)


def scale_rows(x: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Queries and relative states grow with the logarithm of their position; tau has 1 for all dimensions but rows."""
    return (x.float() * tau).to(x.dtype)


HOOKS = (
    Hook(
        "sglang.srt.arg_groups.mamba_hook.validate_mamba_extra_buffer",
        "(view, hf_config, *, mamba_cache_chunk_size_of)",
        "Refuses snapshots of states without a GPU; Inkling cannot do without.",
        accept_snapshots,
        around=True,
    ),
    Hook(
        "sglang.srt.configs.inkling.InklingStateDType",
        "(*, conv=torch.bfloat16, temporal=torch.bfloat16)",
        "The convolutions' states are bfloat16 whatever the model's type is, and decode is off by as much.",
        exact_state,
    ),
    Hook(
        "sglang.srt.entrypoints.openai.chat_encoding_adapters.build_chat_encoding_adapter",
        "(ctx)",
        "A server asks for the package `tml-renderers`, which renders chats, also where it gets token ids alone.",
        without_chats,
        around=True,
    ),
    Hook(
        f"{COMMON}.kernels.sconv.fused_decode_sconv_metadata",
        "(B, cache_indices, out=None)",
        NO_DRIVER.format("decode"),
        decode_metadata,
    ),
    Hook(
        f"{OPS}.mamba.mamba_state_indices_triton.fused_replay_state_indices",
        "(*, req_pool_indices, mamba_index_mapping, out_state_indices, valid_bs, total_bs, v2p=None)",
        NO_DRIVER.format("prefill and decode"),
        state_slots,
    ),
    Hook(
        f"{COMMON}.kernels.sconv.causal_conv1d",
        "(x, weight, sconv_cache, cache_mask, safe_idx, cu, si, activation=None, use_residual=True, is_decode=False)",
        NO_DRIVER.format("prefill"),
        causal_conv1d,
    ),
    Hook(
        f"{COMMON}.kernels.sconv.update_sconv_cache",
        "(x, sconv_cache, cache_indices, has_initial_state, query_start_loc)",
        NO_DRIVER.format("prefill"),
        update_sconv_cache,
    ),
    Hook(
        f"{COMMON}.kernels.sconv.fused_causal_conv1d_update_decode",
        "(x, weight, sconv_cache, cache_indices, cache_mask, activation=None, use_residual=True, track_mask=None, "
        "track_indices=None)",
        NO_DRIVER.format("decode"),
        decode_convolution,
    ),
    Hook(
        f"{COMMON}.sconv.fused_gather_scatter_to_sconv_cache",
        "(hidden_states, sconv_cache, track_conv_indices, mask, dst_indices)",
        NO_DRIVER.format("prefill"),
        take_snapshots,
    ),
    Hook(
        f"{COMMON}.attn.serving_attention_backend",
        "(forward_batch)",
        "Takes two backends of GPUs only.",
        score_mod_backend,
    ),
    Hook(
        f"{NATIVE}.forward_extend",
        "(self, q, k, v, layer, forward_batch, save_kv_cache=True)",
        "Knows no relative bias, and reads keys of sliding layers from the slots of the others; called in prefill.",
        extend_attention,
        around=True,
    ),
    Hook(
        f"{NATIVE}.forward_decode",
        "(self, q, k, v, layer, forward_batch, save_kv_cache=True)",
        "The same in decode.",
        decode_attention,
        around=True,
    ),
    Hook(
        f"{OPS}.elementwise.row_scale.apply_log_scaling_tau",
        "(x, tau)",
        NO_DRIVER.format("global layers of a model with log_scaling_n_floor"),
        scale_rows,
    ),
)
