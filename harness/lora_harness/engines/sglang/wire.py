"""What a SGLang engine is sent and answers, apart from the way it travels: both clients speak it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_harness.engines.sglang.client import SglangCompletion, SglangRequest
from lora_plugins_sdk.errors import LoraError

# SGLang keeps seeds as int64.
_SEEDS = 2**63


def generate_fields(requests: Sequence[SglangRequest]) -> dict[str, Any]:
    """The fields of SGLang's `GenerateReqInput` that ask for all of `requests` at once."""
    fields: dict[str, Any] = {
        "rid": [one.rid for one in requests],
        "input_ids": [list(one.prompt_ids) for one in requests],
        "sampling_params": [_sampling_fields(one) for one in requests],
        "return_logprob": True,
    }
    if any(one.adapter is not None for one in requests):
        # An engine without LoRA refuses the field, whatever it holds.
        fields["lora_path"] = [one.adapter for one in requests]
    return fields


def _sampling_fields(request: SglangRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        # SGLang adds the model's own end tokens to any stop tokens, unless it is to ignore them all.
        "ignore_eos": not sampling.stop_token_ids,
        "sampling_seed": request.seed % _SEEDS,
    }


def read_completion(engine: str, request: SglangRequest, answer: Mapping[str, Any]) -> SglangCompletion:
    """SGLang's answer to one request.

    Args:
        engine: the engine's name, for errors.
        request: what was asked.
        answer: one element of the answer, with its ``meta_info``.

    Raises:
        LoraError: the engine stopped at a token that is not among the request's stop tokens.
    """
    meta = answer["meta_info"]
    drawn = meta.get("output_token_logprobs") or ()
    token_ids = tuple(int(entry[1]) for entry in drawn)
    reason = meta["finish_reason"]["type"]
    if reason == "stop" and token_ids[-1] not in request.sampling.stop_token_ids:
        raise LoraError(
            f"engine {engine}",
            reason=f"ended a completion at token {token_ids[-1]}, an end token of the model that is no stop token here",
            cure="add it to the request's stop tokens, or take it out of the model's generation_config.json",
        )
    return SglangCompletion(
        token_ids=token_ids,
        logprobs=tuple(float(entry[0]) for entry in drawn),
        finish_reason=reason,
        weight_version=_one_weight_version(meta),
    )


def _one_weight_version(meta: Mapping[str, Any]) -> str | None:
    spans = {str(span["version"]) for span in meta.get("weight_versions") or ()}
    if len(spans) > 1:
        return None
    return next(iter(spans), meta.get("weight_version"))


def pack_tensors(tensors: Any) -> bytes:
    """A container of tensors for `update_weights_from_tensor` and `load_lora_adapter_from_tensors`.

    By value: what SGLang's own serialiser writes for CPU tensors is a handle to shared memory, which only processes of
    one family can open, while a plain pickle can be read by another process, machine and torch version.

    Args:
        tensors: a dict name -> tensor, or a list of pairs; see `portable`.
    """
    return pickle.dumps(tensors, protocol=4)


def portable(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU without gradient, contiguous, and with no more storage than it shows (a pickle keeps all)."""
    value = tensor.detach().to("cpu").contiguous()
    own = value.numel() * value.element_size()
    return value if value.untyped_storage().nbytes() == own else value.clone(memory_format=torch.contiguous_format)


def weight_checksums(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Checksums by the engine's own names; with tensor parallelism every rank's share has a name of its own."""
    if len(ranks) == 1:
        return dict(ranks[0]["checksums"])
    return {f"{name}@{rank}": value for rank, one in enumerate(ranks) for name, value in one["checksums"].items()}
