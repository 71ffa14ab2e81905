"""Short causal convolutions, channel by channel, around a skip connection."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from torch import Tensor, nn

from lora_plugin_inkling.model.tensor_parallel import empty_weight


class ShortConv(nn.Module):
    """`y[t] = x[t] + sum_k w[:, k] * x[t - kernel + 1 + k]` per channel, in float32; tokens before the first are zero.

    Parameter `weight` `[channels, 1, kernel]` as in HF.

    Args:
        config: megatron-core's TransformerConfig.
        channels: of this rank.
        kernel: tokens it reaches over, the current one included.
        split_channels: the channels are this rank's part, over the whole text. Otherwise every rank has all channels,
            under sequence parallelism of its own part of the text.
        tp_group: the tensor parallel group.
    """

    def __init__(self, config: Any, channels: int, kernel: int, *, split_channels: bool, tp_group: Any) -> None:
        super().__init__()
        split_tokens = config.sequence_parallel and not split_channels
        self.kernel = kernel
        self.group = tp_group if split_tokens else None
        self.weight = empty_weight(channels, 1, kernel, config=config, sequence_parallel=split_tokens)
        if split_channels:
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, channels] -> the same shape and dtype."""
        dtype, x = x.dtype, x.float()
        length = x.shape[0]
        reach = self.kernel - 1
        before = x.new_zeros(reach, *x.shape[1:]) if self.group is None else earlier_tokens(x, reach, self.group)
        seen = torch.cat([before, x])
        taps = self.weight[:, 0].float().unbind(-1)
        return sum((tap * seen[shift : shift + length] for shift, tap in enumerate(taps)), start=x).to(dtype)


def earlier_tokens(x: Tensor, count: int, group: Any) -> Tensor:
    """`[count, b, c]`: the tokens before this rank's first, zero before the text begins.

    Ranks exchange the ends of their parts only, of which several are needed where a part is shorter than `count`.
    """
    tail = x[-count:].contiguous()
    tails = gather_from_sequence_parallel_region(tail, tensor_parallel_output_grad=True, group=group)
    before = tails[: group.rank() * tail.shape[0]][-count:]
    return nn.functional.pad(before, (0, 0, 0, 0, count - before.shape[0], 0))
