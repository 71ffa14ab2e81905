"""Reading a HF model and tokenizer from a local directory, with errors that name what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_plugins_sdk import load_plugin, read_hf_config
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_parameters import HfParameter, hf_parameters
from lora_plugins_sdk.staging import directory_problem

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_hf_model(directory: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The language model of `directory`, alone or within a multimodal one, in eval mode, frozen. Never asks a network.

    Raises:
        LoraError: the directory, its config.json, its safetensors weights or a package that the model needs are
            missing, or the weights do not fit the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _require_file(directory, ("config.json",), "model config")
    _require_file(directory, _WEIGHTS, "safetensors weights")
    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
    family: Any = AutoModelForCausalLM
    if config.get_text_config() is not config:
        # Not the language model alone, which has no prefix before its modules, whereas adapters name them with one.
        from transformers import AutoModelForMultimodalLM as family
    try:
        loaded: Any = family.from_pretrained(directory, dtype=dtype, local_files_only=True, output_loading_info=True)
    except ImportError as error:
        raise LoraError(
            str(directory), reason=f"transformers cannot build this model: {error}", cure="install what is missing"
        ) from error
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


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTraits:
    """What transformers and PEFT must be told of a model; the defaults are those of a plain one.

    Args:
        parameters: weights that PEFT must target as parameters: fused experts, stacks, routers, a padded head.
        left_padding: whether a row that is padded on the left gives what it gives alone.
    """

    parameters: tuple[HfParameter, ...] = ()
    left_padding: bool = True


PLAIN = HfTraits()


def hf_traits(directory: Path, plugin: str | None) -> HfTraits:
    """What the plugin of a model declares of it.

    Args:
        directory: HF directory.
        plugin: the plugin that serves it, where several do.

    Raises:
        LoraError: the config.json is missing, or no plugin serves the model.
    """
    hf_config = read_hf_config(directory)
    architecture = load_plugin(str(hf_config.get("model_type")), plugin=plugin).architecture
    parameters = hf_parameters(architecture, hf_config)
    return HfTraits(parameters=tuple(parameters), left_padding=architecture.left_padding)


def load_hf_tokenizer(directory: Path) -> Any:
    """The tokenizer of `directory`. Never asks a network.

    Raises:
        LoraError: no tokenizer files.
    """
    from transformers import AutoTokenizer

    _require_file(directory, _TOKENIZERS, "tokenizer")
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _require_file(directory: Path, names: tuple[str, ...], what: str) -> None:
    if problem := directory_problem(directory):
        raise LoraError(str(directory), reason=problem, cure="give the path of a local HF model directory")
    if not any((directory / name).is_file() for name in names):
        raise LoraError(
            str(directory),
            reason=f"has no {what} ({' or '.join(names)})",
            cure="give a complete HF model directory, as save_pretrained writes it",
        )
