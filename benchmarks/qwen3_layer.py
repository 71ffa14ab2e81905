"""One adapted layer of Qwen3 on the torch reference host, with the sizes of a published model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.free_linear import free_forward
from lora_plugins_sdk import LoraConfig, ParallelRun, RunFacts, attach, load_plugin
from lora_plugins_sdk.hosts.initialize import initialize_megatron
from lora_plugins_sdk.table import SitePlan


def hf_config(hidden: int, *, layers: int = 1, vocab: int = 128) -> dict[str, Any]:
    """A Qwen3 config.json: with hidden 1024 the layers of Qwen3-0.6B, with 2048 those of Qwen3-1.7B."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }


@cache
def one_process() -> ParallelRun:
    """megatron-core's parallel state for this process alone."""
    return initialize_megatron(RunFacts())


def randomize(module: nn.Module) -> None:
    """Small random matrices (B included: zeros would leave A without a gradient), norms at one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedSite:
    """One adapted host linear with an input and a gradient of its output.

    Args:
        name: the linear's name.
        module: the linear, its factors under `lora`.
        x: `[tokens, 1, in]`, requires grad.
        grad: `[tokens, 1, out]`.
    """

    name: str
    module: Any
    x: Tensor
    grad: Tensor

    @property
    def plan(self) -> SitePlan:
        """Layout and rows."""
        return self.module.lora.plan

    @property
    def weight(self) -> Tensor:
        """The frozen host weight `[out, in]`."""
        return self.module.weight

    @property
    def projections(self) -> int:
        """Adapted projections that the weight packs."""
        return len(self.plan.adapted)

    @property
    def rank(self) -> int:
        """Rank of each of them."""
        return self.module.lora.a.shape[0] // self.projections

    @property
    def base_flops(self) -> int:
        """Forward and dX of the frozen linear: 2 * 2 * T * in * out."""
        return 4 * len(self.x) * self.weight.numel()

    @property
    def branch_flops(self) -> int:
        """Forward, factor gradients and dX of the branch: 3 * 2 * T * r * (n * in + out)."""
        out, width = self.weight.shape
        return 6 * len(self.x) * self.rank * (self.projections * width + out)

    def step(self, *, adapted: bool) -> None:
        """Forward and backward through the host linear, with or without its branch."""
        self.module.lora.enabled = adapted
        output, _ = self.module(self.x)
        output.backward(self.grad)
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        self.x.grad = None
        for parameter in self.module.lora.parameters():
            parameter.grad = None


def adapted_sites(*, hidden: int, rank: int, tokens: int, free: bool = False) -> list[AdaptedSite]:
    """The four linears of one layer, built by the plugin and adapted by `attach`, in fp32.

    Args:
        hidden: hidden size, 1024 or 2048 for a published model's.
        rank: LoRA rank.
        tokens: tokens of the inputs.
        free: put a linear that costs nothing in the place of each frozen one before attaching.
    """
    run, config, plugin = one_process(), hf_config(hidden), load_plugin("qwen3")
    model: Any = plugin.build_model(config, run, torch.float32)
    attention, mlp = model.decoder.layers[0].self_attention, model.decoder.layers[0].mlp
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    for linear in linears if free else ():
        fused_norm = hasattr(linear, "return_layernorm_output")
        linear.forward = free_forward(linear.weight, tokens, fused_norm=fused_norm)
    attach(model, plugin, config, LoraConfig(rank=rank), run)
    randomize(model)
    sites = []
    for linear in linears:
        out, width = linear.weight.shape
        x, grad = torch.randn(tokens, 1, width, requires_grad=True), torch.randn(tokens, 1, out)
        sites.append(AdaptedSite(name=linear.lora.plan.site.name, module=linear, x=x, grad=grad))
    return sites
