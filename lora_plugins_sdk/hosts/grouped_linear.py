"""The experts of one rank as one module: Transformer Engine's GroupedLinear in pure torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from lora_plugins_sdk.errors import LoraError


class TorchGroupedLinear(nn.Module):
    """One linear per local expert; parameters `weight0` ... `weight{n - 1}`, each `[out, in]` of this rank.

    Over the expert tensor parallel group nothing is communicated here: megatron-core's token dispatcher hands every
    rank of that group the same tokens and sums their outputs.

    Args:
        num_gemms: number of local experts.
        input_size, output_size: full widths of one expert; one of them is divided over expert tensor parallelism.
        config: megatron-core's TransformerConfig.
        init_method: fills a weight in place.
        bias: refused; the experts of this host have none.
        pg_collection: megatron-core's process groups; `expt_tp` divides the widths.

    Raises:
        LoraError: with a bias, or a width that expert tensor parallelism does not divide.
    """

    split_dim: int
    """Dimension of the weights that expert tensor parallelism splits."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        del unused  # part of Transformer Engine's signature; nothing here depends on it
        if bias:
            raise LoraError(
                "expert bias",
                reason="the torch reference host's experts have none",
                cure="set add_bias_linear to False, or use Transformer Engine on a GPU",
            )
        self.config = config
        self.num_gemms = num_gemms
        shape = [output_size, input_size]
        ranks = pg_collection.expt_tp.size()
        if shape[self.split_dim] % ranks:
            raise LoraError(
                f"expert tensor parallel size {ranks}",
                reason=f"does not divide the experts' width {shape[self.split_dim]}",
                cure=f"use an expert tensor parallel size that divides {shape[self.split_dim]}",
            )
        shape[self.split_dim] //= ranks
        device = torch.cuda.current_device()
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.split_dim, stride=1)
            # Experts are replicated over the expert data parallel group. That is the plain data parallel group exactly
            # when EP is 1 and expert TP equals TP; the flag may then say either.
            weight.allreduce = False  # type: ignore[attr-defined]
            init_method(weight)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        """Tokens `[sum(m_splits), in]`, sorted by expert -> (`[sum(m_splits), out]`, None).

        A loop: one grouped matmul would first have to stack the weights, which costs more than it saves.
        """
        parts = x.split(list(m_splits))
        weights = (self.get_parameter(f"weight{index}") for index in range(self.num_gemms))
        return torch.cat(
            [nn.functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
        ), None


class TorchColumnParallelGroupedLinear(TorchGroupedLinear):
    """Experts whose output is split over expert tensor parallelism."""

    split_dim = 0


class TorchRowParallelGroupedLinear(TorchGroupedLinear):
    """Experts whose input is split over expert tensor parallelism; the dispatcher sums the outputs."""

    split_dim = 1
