"""Whether a host's weight, of a linear or of the embedding, has the shape that the plan gives it on this rank."""

from __future__ import annotations

import torch
from torch import nn

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.pack import pads
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import SitePlan
from lora_plugins_sdk.vocabulary_padding import padding_cure


def check_weight_shape(module: nn.Module, plan: SitePlan, expected: tuple[int, int], facts: RunFacts) -> None:
    """Refuse a module whose weight has another shape than the plan's on this rank.

    Raises:
        LoraError: that; of a vocabulary it says how the run is told of other padding.
    """
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
    if shape == expected:
        return
    cure = "attach with the config.json and the parallel sizes that the model was built with"
    if pads(plan.site.pack) and shape is not None and shape[1:] == expected[1:]:
        vocabulary = plan.rows[0].full_shape[1] if plan.site.embedding else plan.layout.rows(0)
        cure += f"; {padding_cure(shape[0], vocabulary, facts)}"
    raise LoraError(
        plan.host_module, reason=f"its weight has shape {shape}, the HF config and run give {expected}", cure=cure
    )
