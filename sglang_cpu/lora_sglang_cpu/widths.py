"""Widths of MLPs and experts as the checkpoint has them.

For its own CPU kernels SGLang pads them to multiples of 32 on each rank. An adapter is not padded along, and a merged
model's weights are then not those of the checkpoint. Plain torch needs no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lora_sglang_cpu.hook import Hook


def unpadded(padding: Callable[..., int], weight_block_size: Any) -> int:
    """Stand-in for `get_moe_padding_size`: SGLang's own for quantised weights, else one."""
    return 1 if weight_block_size is None else padding(weight_block_size)


HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.configs.update_config.get_moe_padding_size",
        signature="(weight_block_size)",
        reason="an adapter whose width is no multiple of 32 ends the engine at its first request",
        stand_in=unpadded,
        around=True,
    ),
)
