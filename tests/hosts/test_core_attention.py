"""Core attention of the torch host against explicit scores and softmax."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.attention import TorchCausalAttention


def _attention(mask_type: AttnMaskType = AttnMaskType.causal, **kwargs: Any) -> TorchCausalAttention:
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=1)
    for name in [name for name in kwargs if hasattr(config, name)]:
        setattr(config, name, kwargs.pop(name))
    return TorchCausalAttention(config, 1, mask_type, "self", cp_comm_type=None, pg_collection=None, **kwargs)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_grouped_queries_attend_causally(scale: float | None) -> None:
    torch.manual_seed(0)
    query = torch.randn(7, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(7, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = _attention(softmax_scale=scale)(query, key, value, None, attn_mask_type=AttnMaskType.causal)
    heads = []
    for head in range(6):  # heads 0 and 1 read group 0, heads 2 and 3 group 1, and so on
        q, k, v = query[:, :, head], key[:, :, head // 2], value[:, :, head // 2]
        scores = torch.einsum("sbd,tbd->bst", q, k) * (scale or 1 / math.sqrt(4))
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
        heads.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1), v))
    expected = torch.cat(heads, dim=-1)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(out)
    inputs = (query, key, value)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("kwargs", "subject"),
    [
        ({"mask_type": AttnMaskType.no_mask}, "no_mask"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_what_it_cannot_do_is_refused_at_construction(kwargs: dict[str, Any], subject: str) -> None:
    with pytest.raises(LoraError, match=subject):
        _attention(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)},
        {"attention_mask": None, "attn_mask_type": AttnMaskType.no_mask},
        {"attention_mask": None, "attention_bias": torch.zeros(3, 3)},
        {"attention_mask": None, "packed_seq_params": object()},
    ],
    ids=["mask", "mask type", "bias", "packed"],
)
def test_arguments_without_effect_are_refused(kwargs: dict[str, Any]) -> None:
    x = torch.randn(3, 1, 2, 4)
    with pytest.raises(LoraError, match="pad on the right"):
        _attention()(x, x, x, **kwargs)
