"""Named capabilities: what a plugin may say it lacks, and nothing else is an opt-out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from lora_plugins_sdk.errors import Diagnostic, raise_if_any

CAPABILITIES: Mapping[str, str] = {
    "tensor-parallel": "runs with TP above 1",
    "sequence-parallel": "runs with sequence parallelism",
    "pipeline-parallel": "runs with PP above 1",
    "data-parallel": "runs with DP above 1",
    "context-parallel": "runs with CP above 1",
    "expert-parallel": "runs with EP above 1, and with an ETP that is not TP",
    "recompute": "trains with activation recompute",
    "dropout": "trains with LoRA dropout",
    "bfloat16": "runs with a bfloat16 base",
    "build-model": "builds its base model (lora_build_model)",
    "fold": "transformers has one plain weight per projection, to which the product B A can be added",
    "peft-names": "names exported tensors as PEFT does",
    "peft": "PEFT loads the exported adapter onto the transformers model",
}


def check_lacks(lacks: Mapping[str, str]) -> None:
    """Refuse opt-outs that name no capability or give no reason.

    Raises:
        LoraError: listing each of them.
    """
    found = []
    for name, reason in lacks.items():
        if name not in CAPABILITIES:
            close = difflib.get_close_matches(name, CAPABILITIES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            found.append(
                Diagnostic(
                    subject=f"lacks {name!r}",
                    reason="is no capability that a check needs",
                    cure=f"{hint}known: {', '.join(CAPABILITIES)}",
                )
            )
        elif not reason.strip():
            found.append(
                Diagnostic(subject=f"lacks {name!r}", reason="gives no reason", cure="say why the plugin lacks it")
            )
    raise_if_any("invalid opt-outs:", found)
