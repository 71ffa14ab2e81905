"""Full factors into this rank's shards: the inverse of `gather`. Talks to nobody."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lora_plugins_sdk.adapter import LoraAdapter
from lora_plugins_sdk.factors import TensorOf
from lora_plugins_sdk.shards import shard
from lora_plugins_sdk.table import ParamRow


def scatter_factors(
    adapter: LoraAdapter, fulls: Mapping[ParamRow, torch.Tensor], of: TensorOf = torch.Tensor.detach
) -> None:
    """Write this rank's part of every factor, in place.

    Args:
        adapter: the attached adapter.
        fulls: every factor of the model in HF order, `row.full_shape`.
        of: what to write in place of the factors themselves: a tensor of a parameter's shape.
    """
    with torch.no_grad():
        for factors in adapter.factors():
            for row in factors.plan.rows:
                factors.local(row, of).copy_(shard(row, fulls[row], adapter.run))
