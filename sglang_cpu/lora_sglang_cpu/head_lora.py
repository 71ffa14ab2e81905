"""Adapters on the head: SGLang computes logits for a prompt's last token alone, and its torch backend for LoRA goes on
counting all of the prompt's tokens.

Rows of the head then get the adapter of another request as soon as one batch of prompts has several, two versions of a
policy for example. SGLang's other backends know which rows are left; with these hooks the torch backend does too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lora_sglang_cpu.hook import Hook

_BACKEND = "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend"


def route_the_head(
    prepare: Callable[..., None], backend: Any, forward_batch: Any, weight_indices: Any, *rest: Any, **more: Any
) -> None:
    """Stand-in for `prepare_lora_batch`: SGLang's own, and for the head one segment for each request's rows."""
    from sglang.srt.lora.utils import get_lm_head_pruned_lens

    prepare(backend, forward_batch, weight_indices, *rest, **more)
    lengths = get_lm_head_pruned_lens(forward_batch)
    backend.lm_head_batch_info = None
    if lengths is not None:
        rows = torch.tensor(lengths, dtype=torch.int32)
        backend.lm_head_batch_info = replace(
            backend.batch_info,
            num_segments=len(lengths),
            seg_lens_cpu=rows,
            seg_indptr_cpu=torch.cat([rows.new_zeros(1), rows.cumsum(0, dtype=torch.int32)]),
            weight_indices_cpu=torch.tensor(list(weight_indices), dtype=torch.int32),
            expected_tokens=sum(lengths),
        )


def with_the_heads_rows(product: Callable[..., torch.Tensor], backend: Any, *args: Any, **more: Any) -> torch.Tensor:
    """Stand-in for the product with A: SGLang's own, counting the head's rows where it is the head that asks."""
    pruned, whole = more.pop("pruned_batch_info", None), backend.batch_info
    backend.batch_info = whole if pruned is None else pruned
    try:
        return product(backend, *args, **more)
    finally:
        backend.batch_info = whole


def onto_the_heads_tokens(
    product: Callable[..., torch.Tensor],
    backend: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    output_offset_cpu: torch.Tensor,
    *args: Any,
    **more: Any,
) -> torch.Tensor:
    """Stand-in for the product with B: as above, and a head padded beyond its tokens has no rows of B there."""
    offsets = output_offset_cpu.clamp(max=weights.shape[1])
    return with_the_heads_rows(product, backend, x, weights, offsets, *args, **more)


HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_BACKEND}.prepare_lora_batch",
        signature="(self, forward_batch, weight_indices, lora_ranks, scalings, use_cuda_graph, "
        "use_prefill_cuda_graph=False)",
        reason="a row of the head gets another request's adapter",
        stand_in=route_the_head,
        around=True,
    ),
    Hook(
        target=f"{_BACKEND}.run_lora_a_sgemm",
        signature="(self, x, weights, stack_num=1, *args, **kwargs)",
        reason="the head's rows are not told to the product with A",
        stand_in=with_the_heads_rows,
        around=True,
    ),
    Hook(
        target=f"{_BACKEND}.run_lora_b_sgemm",
        signature="(self, x, weights, output_offset_cpu, base_output=None, *args, **kwargs)",
        reason="the head's rows are not told to the product with B, and those of a padded head do not fit B",
        stand_in=onto_the_heads_tokens,
        around=True,
    ),
)
