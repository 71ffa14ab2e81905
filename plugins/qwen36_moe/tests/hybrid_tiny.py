"""A small Qwen3.5 MoE with random weights, as a HF directory: what every test here starts from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk import LoraConfig, PeftAdapter, RunFacts, derive_table, load_plugin

BATCH, TOKENS = 2, 96  # longer than one chunk (64) of the delta rule
CONFIG: dict[str, Any] = dict(load_plugin(architecture="qwen36_moe").architecture.tiny_config)
VOCABULARY: int = CONFIG["vocab_size"]


def make_checkpoint(directory: Path, **config: Any) -> Path:
    """Save a model in which every weight matters: what starts constant (norms, biases, decays) is perturbed."""
    from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen3_5MoeTextConfig(**{**CONFIG, **config}))
    perturb(model)
    model.save_pretrained(directory)
    return directory


def perturb(model: Any) -> None:
    """Matrices of nearly unit gain, and vectors that differ from element to element.

    Decays are slow: with fast ones a head's output is at some tokens nearly zero, and the norm that follows makes
    rounding errors of it as large as the tolerance.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "A_log" in name:
                weight.copy_(-2 + 0.5 * torch.randn_like(weight))
            elif weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
            elif "conv1d" in name or "embed_tokens" in name:
                weight.copy_(0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 0.7 * weight.shape[-1] ** -0.5)


def hf_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def tokens() -> Tensor:
    """`[BATCH, TOKENS]`."""
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(7))


Factors = dict[tuple[str, str], Tensor]
"""Full factors by HF module, `{expert}` in its name, and "A" or "B"."""


def random_adapter(lora: LoraConfig, config: Mapping[str, Any] = CONFIG) -> tuple[PeftAdapter, Factors]:
    """A random adapter as a file holds it, and its full factors; no B is zero."""
    plugin = load_plugin(architecture="qwen36_moe")
    factors, tensors = {}, {}
    for row in derive_table(plugin, config, lora, RunFacts()).rows:
        draw = torch.Generator().manual_seed(zlib.crc32(row.init_key.encode()))
        full = torch.randn(row.full_shape, generator=draw) * (0.3 if row.factor == "A" else 0.05)
        factors[row.hf_module, row.factor] = full
        tensors |= plugin.export_tensor(row, full)
    peft: dict[str, Any] = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    if lora.use_rslora:
        peft["use_rslora"] = True
    modules = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    return PeftAdapter(tensors=tensors, config=peft | {"target_modules": sorted(modules)}), factors


def fold(model: Any, factors: Factors, scale: float) -> None:
    """`W += scale * B A` on transformers' model, experts within their fused parameters; the obvious form."""
    for module in {module for module, _ in factors}:
        a, b = factors[module, "A"], factors[module, "B"]
        if "{expert}" not in module:
            delta = scale * b @ a
            model.get_parameter(f"{module}.weight").data += delta.t() if module == "model.embed_tokens" else delta
            continue
        path, leaf = module.split(".{expert}.")
        weight = model.get_submodule(path).get_parameter("down_proj" if leaf == "down_proj" else "gate_up_proj").data
        half = {"gate_proj": slice(0, weight.shape[1] // 2), "up_proj": slice(weight.shape[1] // 2, None)}
        for expert in range(weight.shape[0]):
            mine = [factor[expert if factor.shape[0] > 1 else 0] for factor in (a, b)]
            weight[expert, half.get(leaf, slice(None))] += scale * mine[1] @ mine[0]
