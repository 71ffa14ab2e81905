"""Whether SGLang can serve a base at all. Known from its files, before anything is started. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_harness.config.rollout import SglangSection
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.hosts.rope import YarnScaling, read_rope, rope_fields
from lora_plugins_sdk.serving.sglang_config import missing_keys, unpublished_keys
from lora_plugins_sdk.serving.sglang_places import family_of, text_config
from lora_plugins_sdk.weight_files import read_weight_files

# SGLang's own CPU kernels, which `lora_sglang_cpu` leaves alone, want widths in multiples of this on each rank.
_KERNEL_WIDTH = 32
_FUSED_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_PADDED = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def refuse_unfit_base(section: SglangSection, hf_config: Mapping[str, Any]) -> None:
    """Refuse a base that SGLang would build as another model, or with other widths than the trainer's.

    Args:
        section: SGLang's arguments; servers that run already know their own.
        hf_config: the base's `config.json`.

    Raises:
        LoraError: names the layers or the width.
    """
    missing_keys(hf_config)
    raise_if_any("SGLang cannot serve this base:", [*_uneven(section, hf_config), *_other_positions(hf_config)])


def refuse_other_layouts(base: Path, hf_config: Mapping[str, Any]) -> None:
    """Refuse an Inkling that is not stored as published, and a Qwen3-MoE whose experts are fused: SGLang passes over
    all other names, of tensors and in the config, without a word.

    Args:
        base: HF directory.
        hf_config: its `config.json`.

    Raises:
        LoraError: names one of its tensors, or the keys that its config lacks.
    """
    if hf_config.get("model_type") == "qwen3_moe":
        _refuse_fused_experts(base)
    if family_of(hf_config) != "inkling":
        return
    names = list(read_weight_files(base).where)
    if not any(name.startswith("model.llm.") for name in names):
        raise LoraError(
            str(base),
            reason=f"holds {names[0]} and the like: SGLang reads Inkling as it is published (model.llm.*)",
            cure="give the published checkpoint (the plugin's `published_base` makes one), or use "
            "rollout.engine = 'local'",
        )
    lacking = unpublished_keys(hf_config)
    if lacking:
        raise LoraError(
            str(base / "config.json"),
            reason=f"lacks {', '.join(lacking)} in its text_config: SGLang reads Inkling as it is published",
            cure="give the published config.json, which the trainer reads too, or use rollout.engine = 'local'",
        )


def _refuse_fused_experts(base: Path) -> None:
    fused = [name for name in read_weight_files(base).where if name.endswith(_FUSED_EXPERTS)]
    if fused:
        raise LoraError(
            str(base),
            reason=f"holds {fused[0]} and the like: SGLang reads a Qwen3-MoE with tensors of each expert alone",
            cure="save it with transformers, which writes them so, or use rollout.engine = 'local'",
        )


def _other_positions(hf_config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """YaRN's factor on queries and keys, where SGLang (`layers/rotary_embedding/yarn.py`) has another: it does not read
    `attention_factor`, and takes an `mscale` of 0 as given."""
    text = text_config(hf_config)
    rope = rope_fields(text)
    if rope["rope_type"] != "yarn":
        return
    unset = {**text, "rope_scaling": None, "rope_parameters": {**rope, "attention_factor": None}}
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    if _attention_factor(text) != _attention_factor(unset):
        name = f"attention_factor = {rope['attention_factor']}"
    elif None not in scales and 0 in scales and rope.get("attention_factor") is None:
        name = f"mscale = {scales[0]} and mscale_all_dim = {scales[1]}"
    else:
        return
    yield Diagnostic(
        subject=name,
        reason="gives transformers another factor on queries and keys than SGLang, which then serves another model",
        cure="use rollout.engine = 'local'",
    )


def _attention_factor(text: Mapping[str, Any]) -> float:
    scaling = read_rope(text).scaling
    assert isinstance(scaling, YarnScaling)
    return scaling.attention_factor


def _uneven(section: SglangSection, hf_config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Widths that SGLang pads on a CPU, and refuses elsewhere: the policy's tensors keep theirs and do not fit."""
    if section.urls:
        return
    arguments, text = section.arguments, text_config(hf_config)
    ranks = arguments.get("tp_size") or 1
    # The kernels are asked for on a machine with a GPU too, unless the device is named.
    kernels = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and str(arguments.get("device") or "cpu") == "cpu"
    for name, shared_by in _widths(hf_config, ranks, arguments).items():
        width, padded = text.get(name), kernels and name in _PADDED
        multiple = ranks * _KERNEL_WIDTH if padded else shared_by
        if isinstance(width, int) and width % multiple:
            yield Diagnostic(
                subject=f"{name} = {width}",
                reason=f"SGLang needs a multiple of {multiple} "
                + (f"for its CPU kernels on each of {ranks} ranks" if padded else f"on {shared_by} ranks"),
                cure="unset SGLANG_USE_CPU_ENGINE" if padded else "set another rollout.sglang.arguments.tp_size",
            )


def _widths(hf_config: Mapping[str, Any], ranks: int, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Keys of the MLPs' widths -> how many ranks share each."""
    if family_of(hf_config) == "inkling":
        # `intermediate_size` is an expert's there; shared experts are split over all ranks, however routed ones are.
        return {"dense_intermediate_size": ranks, "intermediate_size": ranks}
    text = text_config(hf_config)
    whole_experts = (arguments.get("ep_size") or 1) * (arguments.get("moe_dp_size") or 1)
    widths = {"moe_intermediate_size": max(ranks // whole_experts, 1), "shared_expert_intermediate_size": ranks}
    # Configs of models with experts in each layer give a width that no layer has.
    experts = text.get("num_experts") or text.get("num_local_experts")
    sparse = experts and not text.get("mlp_only_layers") and text.get("decoder_sparse_step", 1) == 1
    return widths if sparse else {**widths, "intermediate_size": ranks}
