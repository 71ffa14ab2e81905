"""What a PEFT `adapter_config.json` says, and whether its tensors mean plain LoRA. Torch-free."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any

# PEFT options that change what the tensors mean, with the only value that means plain LoRA.
PLAIN: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "ensure_weight_tying": False,
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "monteclora_config": None,
    "rank_pattern": {},
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}
# Options that say how the adapter was made or where it goes, not what its tensors mean.
DESCRIPTIVE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    }
)
_WHOLE = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight")
# Initial values that PEFT takes out of the base weights: such an adapter fits the changed base only.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def plain_lora_problems(config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Whatever makes an adapter's tensors mean something else than `scale * B A` beside each base weight."""
    if config.get("peft_type") != "LORA":
        yield Diagnostic(
            subject=f"peft_type={reprlib.repr(config.get('peft_type'))}",
            reason="is not LoRA",
            cure="give an adapter whose adapter_config.json has peft_type LORA",
        )
    if not isinstance(config.get("use_rslora", False), bool | None):
        yield Diagnostic(
            subject=f"use_rslora={reprlib.repr(config['use_rslora'])}",
            reason="is not true or false",
            cure="correct the config",
        )
    for key, value in config.items():
        if key in PLAIN and (value or PLAIN[key]) != PLAIN[key]:
            yield Diagnostic(
                subject=f"{key[:100]}={reprlib.repr(value)}",
                reason="its tensors mean something else than plain LoRA",
                cure="convert the adapter to plain LoRA first",
            )
        elif key not in PLAIN and key not in DESCRIPTIVE and value:
            yield Diagnostic(
                subject=f"{key[:100]}={reprlib.repr(value)}",
                reason="is not known here and may change what the tensors mean",
                cure="remove the key if it does not, or convert the adapter to plain LoRA",
            )
    init = str(config.get("init_lora_weights"))
    if init.startswith(_CHANGES_BASE):
        yield Diagnostic(
            subject=f"init_lora_weights={reprlib.repr(init)}",
            reason="its initial values were subtracted from the base weights, so it does not fit the base as it is",
            cure="convert it with PEFT's path_initial_model_for_weight_conversion",
        )


def minimal_config(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """A config of plain LoRA with the keys that every PEFT version knows (`use_rslora` only when it is set).

    Args:
        config: the adapter's own, of plain LoRA.
        modules: modules that the adapter holds. They are named in full where the config selects them by other keys
            than `target_modules`, or by a pattern.
    """
    targets = config.get("target_modules")
    selected = any(config.get(key) for key in ("exclude_modules", "layers_to_transform", "target_parameters"))
    plain = isinstance(targets, list) and targets and all(isinstance(one, str) for one in targets) and not selected
    minimal: dict[str, Any] = {
        "base_model_name_or_path": config.get("base_model_name_or_path") or "",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": config["lora_alpha"],
        "lora_dropout": config.get("lora_dropout") or 0.0,
        "peft_type": "LORA",
        "r": config["r"],
        "target_modules": sorted(targets if plain and isinstance(targets, list) else set(modules)),
        "task_type": config.get("task_type") or "CAUSAL_LM",
    }
    if config.get("use_rslora"):
        minimal["use_rslora"] = True
    return minimal


def whole_weights(names: Iterable[str]) -> dict[str, str]:
    """Adapter tensor name -> HF name, for each that is a whole weight and no factor. PEFT saves the base's own head or
    embedding along with an adapter that touches them.
    """
    return {
        name: f"{found['module']}.weight"
        for name in names
        if ".lora_" not in name and (found := _WHOLE.fullmatch(name))
    }


def doubled_wholes(names: Iterable[str]) -> Iterator[Diagnostic]:
    """Whole weights that are there under two names: of two tensors for one weight either could be the trained one."""
    first: dict[str, str] = {}
    for name, hf in sorted(whole_weights(names).items()):
        if first.setdefault(hf, name) != name:
            yield Diagnostic(
                subject=name,
                reason=f"and {first[hf]} are both {hf}",
                cure="save the adapter without whole weights (PEFT: save_embedding_layers=False)",
            )


def read_lora_config(config: Mapping[str, Any]) -> LoraConfig:
    """Rank, alpha and scale of a plain LoRA adapter.

    Raises:
        LoraError: not plain LoRA, or a rank or alpha that is no positive number; everything is listed.
    """
    problems = list(plain_lora_problems(config))
    try:
        lora = LoraConfig(
            rank=config.get("r"),  # type: ignore[arg-type]
            alpha=config.get("lora_alpha"),  # type: ignore[arg-type]
            use_rslora=config.get("use_rslora") is True,
        )
    except LoraError as error:
        raise LoraError.from_diagnostics(
            "this adapter's config cannot be used:", [*problems, *error.diagnostics]
        ) from error
    raise_if_any("this adapter's config cannot be used:", problems)
    return lora
