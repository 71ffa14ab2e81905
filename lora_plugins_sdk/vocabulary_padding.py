"""How the run is told of a vocabulary that the host pads otherwise than to a multiple of the TP size."""

from __future__ import annotations

from lora_plugins_sdk.pack import padded_share
from lora_plugins_sdk.run import RunFacts


def padding_cure(rows: int, vocabulary: int, facts: RunFacts) -> str:
    """The way out where a rank's part of a vocabulary has other rows than the run's facts give it.

    megatron-core's models take the size that they are given. Megatron-LM gives them the tokenizer's size, or
    `--vocab-size`, padded to a multiple of `make_vocab_size_divisible_by`, 128 unless set, times the TP size.

    Args:
        rows: that the host has on this rank.
        vocabulary: rows that HF has.
        facts: of the run.
    """
    if rows * facts.tp < vocabulary:
        return (
            f"build the model for all {vocabulary} tokens of the HF config (Megatron-LM: --vocab-size; the tokenizer "
            "may have fewer)"
        )
    usual = (2**power for power in range(11))
    number = next((one for one in usual if padded_share(vocabulary, facts.tp, one) == rows), rows)
    return (
        "if only its vocabulary is padded otherwise, tell the run how (Megatron-LM's number of that name): "
        f"ParallelRun.from_megatron(make_vocab_size_divisible_by={number})"
    )
