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
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def refuse_unfit_base(section: SglangSection, hf_config: Mapping[str, Any]) -> None:
    """Refuse a base that SGLang would build as another model, or with other widths than the trainer's.

    Args:
        section: SGLang's arguments; servers that run already know their own.
        hf_config: the base's `config.json`.

    Raises:
        LoraError: names the layers or the width.
    """
    missing_keys(hf_config)
    raise_if_any("SGLang cannot serve this base:", _uneven(section, text_config(hf_config)))


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


def _uneven(section: SglangSection, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Widths that SGLang pads on a CPU, and refuses elsewhere: the policy's tensors keep theirs and do not fit."""
    if section.urls:
        return
    ranks = section.arguments.get("tp_size", 1)
    kernels = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    multiple = ranks * (_KERNEL_WIDTH if kernels else 1)
    for name in _WIDTHS:
        width = text.get(name)
        if isinstance(width, int) and width % multiple:
            yield Diagnostic(
                subject=f"{name} = {width}",
                reason=f"SGLang needs a multiple of {multiple} "
                + (f"for its CPU kernels on each of {ranks} ranks" if kernels else f"on {ranks} ranks"),
                cure="unset SGLANG_USE_CPU_ENGINE" if kernels else "set another rollout.sglang.arguments.tp_size",
            )
