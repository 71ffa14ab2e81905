"""Small bases and adapters as files, made without transformers, and the slow and obvious merge to compare with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, ALPHA = 3, 6.0
VOCABULARY = 11
HIDDEN, INNER = 8, 10
PREFIX = "base_model.model."
LINEARS = {"self_attn.q_proj": (HIDDEN, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
LAYERS = 2
MODULES = {
    **{f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in LINEARS.items()},
    "lm_head": (VOCABULARY, HIDDEN),
}
TARGETS = [*sorted(name.rsplit(".", 1)[-1] for name in LINEARS), "lm_head"]
CONFIG: dict[str, Any] = {
    "model_type": "toy",
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "text_config": {"dtype": "float32"},
}
A, B = f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight", f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"
W = "model.layers.0.mlp.up_proj.weight"


def base_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights that are adapted, and others: an embedding, norms, a vision tower's kernel, an integer buffer."""
    torch.manual_seed(1)
    tensors = {f"{module}.weight": torch.randn(shape) for module, shape in MODULES.items()}
    tensors["model.embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN)
    tensors["model.norm.weight"] = torch.randn(HIDDEN)
    tensors["visual.patch_embed.proj.weight"] = torch.randn(4, 3, 2, 2)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["model.position_ids"] = torch.arange(5)
    tensors["model.scalar"] = torch.tensor(2.0, dtype=dtype)
    return tensors


def make_base(directory: Path, tensors: Mapping[str, Tensor] | None = None, *, shards: int = 1, **config: Any) -> Path:
    """A base directory with the files that usually lie beside the weights; an index when there are several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = base_tensors() if tensors is None else tensors
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "assets").mkdir(exist_ok=True)
    (directory / "assets" / "picture.bin").write_bytes(bytes(range(256)))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    placed = {name: f"model-{n % shards + 1:05d}-of-{shards:05d}.safetensors" for n, name in enumerate(sorted(tensors))}
    for file in sorted(set(placed.values())):
        part = {name: tensors[name] for name, where in placed.items() if where == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors.values())}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def adapter_tensors(modules: Mapping[str, tuple[int, int]] = MODULES, rank: int = RANK) -> dict[str, Tensor]:
    """Factors that are not zero."""
    torch.manual_seed(2)
    tensors = {}
    for module, (out, width) in modules.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, width)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, rank)
    return tensors


def make_adapter(directory: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    """An adapter directory for `make_base`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(adapter_tensors() if tensors is None else tensors), directory / "adapter_model.safetensors")
    full = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, **config}
    (directory / "adapter_config.json").write_text(json.dumps(full))
    return directory


def slow_merge(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """`W + scale * B A` in float64, cast to each weight's dtype."""
    merged = dict(base)
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            b = adapter[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix(PREFIX).replace(".lora_A", "")
            merged[weight] = (base[weight].double() + scale * b.double() @ a.double()).to(base[weight].dtype)
    return merged


def weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, read by the safetensors library."""
    return {name: one for file in sorted(directory.glob("*.safetensors")) for name, one in load_file(file).items()}


def fingerprint(directory: Path) -> dict[str, str]:
    """Path -> hash of everything below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "-"
        for path in sorted(directory.rglob("*"))
    }
