"""Build a GPTModel: megatron-core's TransformerConfig for this run and machine, and the model's stage."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.hosts.delta_net import has_fla
from lora_plugins_sdk.hosts.rope import Rope, YarnScaling
from lora_plugins_sdk.hosts.rope_frequencies import inverse_frequencies
from lora_plugins_sdk.hosts.sizes import padded_vocab_size
from lora_plugins_sdk.hosts.torch_backend import decoder_block_spec
from lora_plugins_sdk.parallel_run import ParallelRun


def build_gpt(config: TransformerConfig, run: ParallelRun, dims: ModelDims, *, rope: Rope) -> GPTModel:
    """This rank's pipeline stage of a GPTModel with rotary positions, weights uninitialised.

    Its output is [b, s, padded vocabulary / tp] on the last stage and [s, b, hidden] before it (SP: s / tp).

    Args:
        config: as made by :func:`transformer_config`.
        run: this rank's place; megatron-core's groups must have been initialised with the same sizes.
        dims: gives the vocabulary, the longest sequence and whether the output layer uses the embedding's weight.
        rope: the rotary positions, from :func:`~lora_plugins_sdk.hosts.rope.read_rope`.

    Raises:
        LoraError: the HF config lacks one of these sizes.
    """
    config = _scaled_scores(config, rope)
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder_block_spec(config),  # type: ignore[arg-type]
        vocab_size=padded_vocab_size(dims.resolve("vocab_size"), run.facts),
        max_sequence_length=dims.resolve("max_position_embeddings"),
        pre_process=run.pp_rank == 0,
        post_process=run.pp_rank == run.facts.pp - 1,
        share_embeddings_and_output_weights=dims.flag("tie_word_embeddings"),
        position_embedding_type="rope",
        rotary_base=rope.theta,  # type: ignore[arg-type]
        rotary_percent=rope.percent,
    )
    # megatron-core's own `rope_scaling` fixes three of Llama 3.1's four numbers, and its yarn embedding rotates whole
    # heads only; both differ from plain positions in the frequencies alone.
    plain = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = inverse_frequencies(rope, 2 * len(plain)).to(plain.device)
    return model


def _scaled_scores(config: TransformerConfig, rope: Rope) -> TransformerConfig:
    """The config with YaRN's factor on rotated queries and keys as a factor on their scores.

    Every attention kernel has that, and megatron-core's fused rotations do not have the other.
    """
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    if factor == 1.0:
        return config
    assert config.kv_channels is not None, "TransformerConfig derives it"
    scaled = copy(config)
    scaled.softmax_scale = (config.softmax_scale or config.kv_channels**-0.5) * factor**2
    return scaled


def transformer_config(
    run: ParallelRun, *, dtype: torch.dtype, model: Mapping[str, Any], overrides: Mapping[str, Any]
) -> TransformerConfig:
    """TransformerConfig of a model on this run.

    Args:
        run: gives the parallel sizes.
        dtype: dtype of the weights and activations.
        model: fields that follow from the model.
        overrides: the user's own values for further fields, such as recompute options.

    Raises:
        LoraError: an override that TransformerConfig does not have, or of a field that something else decides.
    """
    decided = _run_fields(run, dtype) | dict(model)
    raise_if_any("These overrides cannot be applied:", _override_problems(overrides, decided))
    return TransformerConfig(**(_machine_fields(model) | decided | dict(overrides)))


def _override_problems(overrides: Mapping[str, Any], decided: Mapping[str, Any]) -> list[Diagnostic]:
    names = sorted(field.name for field in fields(TransformerConfig))
    problems = []
    for name in overrides:
        if name in decided:
            reason, cure = "follows from the run, the dtype and the model", "change it there"
        elif name not in names:
            close = " or ".join(difflib.get_close_matches(name, names)) or "a field that it has"
            reason, cure = "megatron-core's TransformerConfig has no such field", f"use {close}"
        else:
            continue
        problems.append(Diagnostic(subject=f"override {name!r}", reason=reason, cure=cure))
    return problems


def _run_fields(run: ParallelRun, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=run.facts.tp,
        pipeline_model_parallel_size=run.facts.pp,
        context_parallel_size=run.facts.cp,
        expert_model_parallel_size=run.facts.ep,
        expert_tensor_parallel_size=run.facts.etp,
        sequence_parallel=run.facts.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )


def _machine_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for a frozen base on this machine.

    Weights stay uninitialised (an initialiser that does nothing): a checkpoint fills them. Unlike
    `perform_initialization=False`, this keeps the tensor-parallel attributes that 0.16 sets while it initialises.
    """
    cuda = torch.cuda.is_available()
    return dict(
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Also chooses megatron-core's delta rule in torch. Elsewhere it would only forbid kernels.
        deterministic_mode=model.get("experimental_attention_variant") == "gated_delta_net" and not has_fla(),
        gradient_accumulation_fusion=False,  # needs apex, and a frozen base has no weight gradients
        masked_softmax_fusion=False,  # a kernel of megatron-core's own attention, which is not used
        # Fused by torch.compile, which a CPU runs without (see `eager_functions`).
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        moe_grouped_gemm=True,  # the form of experts that Transformer Engine and the torch host share
        # `variable_seq_lengths` passes megatron-core's check only with this, in dense models too.
        moe_token_dispatcher_type="alltoall",
    )


def _leave_uninitialised(tensor: torch.Tensor) -> None:
    """Base weights come from a checkpoint."""
