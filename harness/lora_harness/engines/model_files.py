"""Reading a HF model and tokenizer from a local directory, with errors that name what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lora_plugins_sdk import load_plugin, read_hf_config
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_parameters import HfParameter, hf_parameters

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_hf_model(directory: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The causal language model of `directory` in eval mode, frozen. Never asks a network.

    Raises:
        LoraError: the directory, its config.json or its safetensors weights are missing, or the weights do
            not fit the config.
    """
    from transformers import AutoModelForCausalLM

    _require_file(directory, ("config.json",), "model config")
    _require_file(directory, _WEIGHTS, "safetensors weights")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    model, report = loaded
    misfits = [f"{kind}: {sorted(map(str, names))[:5]}" for kind, names in report.items() if names]
    if misfits:
        raise LoraError(
            str(directory),
            reason="the weights do not fit config.json; " + "; ".join(misfits),
            cure="use the config.json that belongs to the weights",
        )
    return model.to(device).eval().requires_grad_(False)


def context_length(directory: Path) -> int:
    """Positions that the model of `directory` has, for prompt and completion together (`max_position_embeddings`).

    Raises:
        LoraError: the directory or its config.json is missing.
    """
    from transformers import AutoConfig

    _require_file(directory, ("config.json",), "model config")
    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
    return int(config.get_text_config().max_position_embeddings)


def parameters_to_target(directory: Path, plugin: str | None) -> list[HfParameter]:
    """The model's weights that PEFT must target as parameters: those of fused experts, and routers.

    Args:
        directory: HF directory.
        plugin: the plugin that serves it, where several do.

    Raises:
        LoraError: the config.json is missing, or no plugin serves the model.
    """
    hf_config = read_hf_config(directory)
    return hf_parameters(load_plugin(str(hf_config.get("model_type")), plugin=plugin).architecture, hf_config)


def load_hf_tokenizer(directory: Path) -> Any:
    """The tokenizer of `directory`. Never asks a network.

    Raises:
        LoraError: no tokenizer files.
    """
    from transformers import AutoTokenizer

    _require_file(directory, _TOKENIZERS, "tokenizer")
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _require_file(directory: Path, names: tuple[str, ...], what: str) -> None:
    if not directory.is_dir():
        raise LoraError(str(directory), reason="is not a directory", cure="give the path of a local HF model directory")
    if not any((directory / name).is_file() for name in names):
        raise LoraError(
            str(directory),
            reason=f"has no {what} ({' or '.join(names)})",
            cure="give a complete HF model directory, as save_pretrained writes it",
        )
