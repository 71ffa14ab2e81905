"""The numbers of a test: a batch, a loss, and an adapter whose B is not zero."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_plugins_sdk.peft_files import PeftAdapter
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.table import ParameterTable, ParamRow
from lora_plugins_sdk.testing.conformance.subject import Subject

MICROBATCHES = 2
SAMPLES = 2
RELATIVE_DELTA = 0.3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A loss that is linear in the logits: `mean over microbatches of sum(logits * upstream)`.

    Args:
        tokens: `[microbatches, samples, tokens]`.
        upstream: `[microbatches, samples, tokens, vocabulary]`.
        factors: full factors in HF order by `ParamRow.init_key`, A's and B's.
    """

    tokens: Tensor
    upstream: Tensor
    factors: Mapping[str, Tensor]


def make_problem(subject: Subject, **changes: object) -> Problem:
    """The same numbers in every process that asks with the same subject.

    Args:
        subject: gives sizes and seed.
        changes: other LoRA options than the subject's.
    """
    architecture = subject.selected.architecture
    vocabulary = architecture.dims(subject.hf_config).resolve(architecture.vocabulary)
    draw = _generator(subject.seed, "batch")
    shape = (MICROBATCHES, SAMPLES, subject.sequence_length)
    tokens = torch.randint(0, vocabulary, shape, generator=draw)
    # Spread so that a logit's share of the loss, and with it a factor's gradient, is of order one.
    upstream = torch.randn(*shape, vocabulary, generator=draw) / math.sqrt(SAMPLES * subject.sequence_length)
    table = subject.table(RunFacts(), **changes)
    return Problem(tokens=tokens, upstream=upstream, factors={row.init_key: _factor(table, row) for row in table.rows})


def _factor(table: ParameterTable, row: ParamRow) -> Tensor:
    """A drawn as wide as initial A's are; B so that the delta is a fixed part of a base output of unit variance."""
    draw = _generator(table.lora.seed, f"factor {row.init_key}")
    if row.factor == "A":
        return torch.empty(row.full_shape).uniform_(-1, 1, generator=draw) / math.sqrt(row.full_shape[-1])
    width = RELATIVE_DELTA * math.sqrt(3 / table.lora.rank) / table.lora.scale
    return torch.randn(row.full_shape, generator=draw) * width


def peft_adapter(subject: Subject, factors: Mapping[str, Tensor], **changes: object) -> PeftAdapter:
    """Factors as an adapter file's content, written by the plugin's names and a config of our own."""
    table = subject.table(RunFacts(), **changes)
    tensors: dict[str, Tensor] = {}
    for row in table.rows:
        tensors |= subject.selected.export_tensor(row, factors[row.init_key])
    config = {"peft_type": "LORA", "r": table.lora.rank, "lora_alpha": table.lora.alpha}
    if table.lora.use_rslora:
        config["use_rslora"] = True
    return PeftAdapter(tensors=tensors, config=config)


def _generator(seed: int, purpose: str) -> torch.Generator:
    key = hashlib.sha256(f"{seed}:{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
