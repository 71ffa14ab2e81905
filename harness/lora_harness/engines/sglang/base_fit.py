"""Whether SGLang can serve a base at all. Known from its files, before anything is started. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_harness.config.rollout import SglangSection
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.serving.sglang_config import missing_keys, unpublished_keys
from lora_plugins_sdk.serving.sglang_places import family_of, text_config
from lora_plugins_sdk.weight_files import read_weight_files

# SGLang's own CPU kernels, which `lora_sglang_cpu` leaves alone, want widths in multiples of this on each rank.
_KERNEL_WIDTH = 32
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
    raise_if_any("SGLang cannot serve this base:", _uneven(section, hf_config))


def refuse_other_layouts(base: Path, hf_config: Mapping[str, Any]) -> None:
    """Refuse an Inkling that is not stored as published: SGLang passes over all other names, of tensors and in the
    config, without a word.

    Args:
        base: HF directory.
        hf_config: its `config.json`.

    Raises:
        LoraError: names one of its tensors, or the keys that its config lacks.
    """
    if family_of(hf_config) != "inkling":
        return
    names = list(read_weight_files(base).where)
    if not any(name.startswith("model.llm.") for name in names):
        raise LoraError(
            str(base),
            reason=f"holds {names[0]} and the like: SGLang reads Inkling as it is published (model.llm.*)",
            cure="give the published checkpoint (`lora_plugin_inkling.model.published` makes its tensors), or use "
            "rollout.engine = 'local'",
        )
    lacking = unpublished_keys(hf_config)
    if lacking:
        raise LoraError(
            str(base / "config.json"),
            reason=f"lacks {', '.join(lacking)} in its text_config: SGLang reads Inkling as it is published",
            cure="give the published config.json, which the trainer reads too, or use rollout.engine = 'local'",
        )


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
    sparse = text.get("num_experts") and not text.get("mlp_only_layers") and text.get("decoder_sparse_step", 1) == 1
    return widths if sparse else {**widths, "intermediate_size": ranks}
