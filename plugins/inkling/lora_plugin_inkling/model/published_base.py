"""A base of transformers' language model as a published checkpoint: names, config, and the towers beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lora_plugin_inkling.model.config_spellings import SPELLINGS
from lora_plugin_inkling.model.layer_kinds import ATTENTION, MLP
from lora_plugin_inkling.model.published import to_published
from lora_plugins_sdk import Architecture, BaseCheckpoint, LoraError

# What every Inkling has, and a published config says.
_PARTS = ("shared_expert_sink", "use_embed_norm", "use_gate_bias", "use_global_scale", "use_sconv")
_OF_THE_WHOLE = ("architectures", "dtype", "model_type", "transformers_version")
# transformers reads no published checkpoint without towers, and builds large ones where the config does not say. These
# are the smallest that it builds; no text ever reaches them.
_VISION = {"n_layers": 4, "num_channels": 1, "patch_size": 2, "temporal_patch_size": 2}
_AUDIO = {"mel_vocab_size": 2, "n_mel_bins": 1}


def as_published(architecture: Architecture, base: BaseCheckpoint) -> BaseCheckpoint:
    """The same base as its publishers write it, with towers of zeros.

    Args:
        architecture: Inkling.
        base: config and tensors of transformers' `InklingForCausalLM`.

    Raises:
        LoraError: dense layers that are not the first ones, which a published config has no words for.
    """
    text = _text_config(architecture, base.config)
    config = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "dtype": base.config.get("dtype", "float32"),
        "text_config": text,
        "vision_config": _VISION,
        "audio_config": _AUDIO,
    }
    hidden, any_tensor = int(text["hidden_size"]), next(iter(base.tensors.values()))
    return BaseCheckpoint(config=config, tensors=to_published(base.tensors) | _towers(hidden, any_tensor.dtype))


def _text_config(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    dims = architecture.dims(config)
    layers = dims.resolve(architecture.num_layers)
    attention, mlp = (kinds.resolve(dims, layers) for kinds in (ATTENTION, MLP))
    dense, sparse = MLP.types
    first = sum(kind == dense for kind in mlp)
    if list(mlp) != [dense] * first + [sparse] * (layers - first):
        raise LoraError(
            f"{MLP.key} {list(mlp)}",
            reason=f"has dense layers after a sparse one, and a published config has their number alone ({MLP.first})",
            cure="make the dense layers the first ones",
        )
    own = {declared: key for keys in SPELLINGS.values() for declared, key in keys.items()}
    left_out = (*_OF_THE_WHOLE, ATTENTION.key, MLP.key)
    return {
        **{own.get(key, key): value for key, value in config.items() if key not in left_out},
        str(ATTENTION.numbers): [layer for layer, kind in enumerate(attention) if kind == ATTENTION.types[-1]],
        str(MLP.first): first,
        **dict.fromkeys(_PARTS, True),
        "norm_after_topk": True,
        "gate_activation": "sigmoid",
    }


def _towers(hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of `_VISION` and `_AUDIO`. Grey patches: as they are, of 2 x 2 pixels, again, and two in time."""
    channels = 64
    shapes = {
        "model.visual.layers.linear_0.weight": (1, 1),
        "model.visual.layers.norm_0.weight": (1,),
        "model.visual.layers.linear_1.weight": (channels, 2 * 2),
        "model.visual.layers.norm_1.weight": (channels,),
        "model.visual.layers.linear_2.weight": (channels, channels),
        "model.visual.layers.norm_2.weight": (channels,),
        "model.visual.layers.linear_3.weight": (hidden, 2 * channels),
        "model.visual.final_norm.weight": (hidden,),
        "model.audio.encoder.weight": (_AUDIO["n_mel_bins"] * _AUDIO["mel_vocab_size"], hidden),
        "model.audio.final_norm.weight": (hidden,),
    }
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
