"""What every dense GPT builder shares: the run's part of megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch

from lora_plugins_sdk.parallel_run import ParallelRun


def run_fields(run: ParallelRun, dtype: torch.dtype) -> dict[str, Any]:
    """TransformerConfig fields that follow from the run, the dtype and the machine, not from the model.

    Weights stay uninitialised (an initialiser that does nothing): they are loaded afterwards, and so keep megatron-core's
    tensor-parallel attributes, which `perform_initialization=False` loses in 0.16.
    """
    facts, cuda = run.facts, torch.cuda.is_available()
    return dict(
        tensor_model_parallel_size=facts.tp,
        pipeline_model_parallel_size=facts.pp,
        context_parallel_size=facts.cp,
        sequence_parallel=facts.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,  # needs apex, and a frozen base has no weight gradients
        masked_softmax_fusion=False,
        # These are torch.compile'd on first use: seconds of C++ compilation on a CPU.
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        # Lets `variable_seq_lengths` pass megatron-core's check, which looks at this even in dense models.
        moe_token_dispatcher_type="alltoall",
    )


def _leave_uninitialised(tensor: torch.Tensor) -> None:
    """Base weights come from a checkpoint."""
