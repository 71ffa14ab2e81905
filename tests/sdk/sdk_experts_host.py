"""A host for the toy experts: grouped linears under any EP, ETP and TP, between a dispatcher of a few lines.

Every rank of a stage has tokens of its own (sequence parallelism over TP, batch over DP). The dispatcher gathers the
tokens of one ETP x EP group on each of its ranks and sums what they return.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sdk_experts import ARCHITECTURE, EXPERTS, HF_CONFIG
from torch import Tensor, nn
from torch.nn import functional

from lora_plugins_sdk import ParallelRun, SelectedPlugin

HIDDEN, WIDTH, LAYERS, TOKENS = 8, 12, 2, 32


class GatherTokens(torch.autograd.Function):
    """Tokens of all ranks of the group; the gradient is summed back to their owners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


class ReturnTokens(torch.autograd.Function):
    """The transpose of `GatherTokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        mine = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        dist.reduce_scatter_tensor(mine, x.contiguous(), group=group)
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        gathered = grad.new_empty(grad.shape[0] * ctx.group.size(), *grad.shape[1:])
        dist.all_gather_into_tensor(gathered, grad.contiguous(), group=ctx.group)
        return gathered, None


class GroupedLinear(nn.Module):
    """`weight0` ... of the local experts; `forward(x, m_splits) -> (output, None)`."""

    def __init__(self, experts: int, width: int, out: int) -> None:
        super().__init__()
        for number in range(experts):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.empty(out, width)))

    def forward(self, x: Tensor, m_splits: list[int] | Tensor) -> tuple[Tensor, None]:
        parts = x.split(m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits)
        weights = [getattr(self, f"weight{number}") for number in range(len(parts))]
        return torch.cat([functional.linear(one, weight) for one, weight in zip(parts, weights, strict=True)]), None


class Experts(nn.Module):
    def __init__(self, run: ParallelRun) -> None:
        super().__init__()
        local, width = EXPERTS // run.facts.ep, WIDTH // run.facts.etp
        self.linear_fc1, self.linear_fc2 = GroupedLinear(local, HIDDEN, 2 * width), GroupedLinear(local, width, HIDDEN)

    def forward(self, x: Tensor, m_splits: list[int], probs: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x, m_splits)[0].chunk(2, dim=-1)
        return self.linear_fc2(torch.tanh(gate) * up * probs, m_splits)[0]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities `[T, experts]` of the best two, zero elsewhere; the last expert is never chosen."""
        logits = (x.detach() @ self.weight.t()).index_fill(1, torch.tensor([EXPERTS - 1]), -torch.inf)
        best = logits.topk(2, dim=1)
        return torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(1))


class Mlp(nn.Module):
    def __init__(self, run: ParallelRun) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts(run)
        self.group, self.first = run.etp_ep_group, run.ep_rank * (EXPERTS // run.facts.ep)
        self.local = EXPERTS // run.facts.ep

    def forward(self, x: Tensor) -> Tensor:
        probs = self.router(x)
        if self.group is not None:
            x, probs = GatherTokens.apply(x, self.group), GatherTokens.apply(probs, self.group)
        mine = probs[:, self.first : self.first + self.local].t()
        expert, token = mine.nonzero(as_tuple=True)  # sorted by expert
        splits = expert.bincount(minlength=self.local).tolist()
        y = self.experts(x[token], splits, mine[expert, token].unsqueeze(1))
        out = torch.zeros_like(x).index_add(0, token, y)
        return out if self.group is None else ReturnTokens.apply(out, self.group)


class Layer(nn.Module):
    def __init__(self, run: ParallelRun) -> None:
        super().__init__()
        self.mlp = Mlp(run)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class MoeModel(nn.Module):
    """`forward(x [T, hidden]) -> [T, hidden]`."""

    def __init__(self, run: ParallelRun) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(run) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


def hf_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every HF tensor of the model, experts one by one."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.5).to(dtype)

    weights = {}
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        weights[f"{mlp}.gate.weight"] = draw(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            weights[f"{mlp}.experts.{expert}.gate_proj.weight"] = draw(WIDTH, HIDDEN)
            weights[f"{mlp}.experts.{expert}.up_proj.weight"] = draw(WIDTH, HIDDEN)
            weights[f"{mlp}.experts.{expert}.down_proj.weight"] = draw(HIDDEN, WIDTH)
    return weights


def moe_model(run: ParallelRun | None = None, dtype: torch.dtype = torch.float32) -> MoeModel:
    """This rank's part of the model, filled by hand (not the way the SDK loads it)."""
    run = run or ParallelRun.single()
    model, weights = MoeModel(run).to(dtype), hf_weights(dtype)
    local, width = EXPERTS // run.facts.ep, WIDTH // run.facts.etp
    rows = slice(run.etp_rank * width, (run.etp_rank + 1) * width)
    with torch.no_grad():
        for layer in range(LAYERS):
            hf, host = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
            model.get_parameter(f"{host}.router.weight").copy_(weights[f"{hf}.gate.weight"])
            for number in range(local):
                one = f"{hf}.experts.{run.ep_rank * local + number}"
                gate_up = [weights[f"{one}.{name}.weight"][rows] for name in ("gate_proj", "up_proj")]
                model.get_parameter(f"{host}.experts.linear_fc1.weight{number}").copy_(torch.cat(gate_up))
                down = weights[f"{one}.down_proj.weight"][:, rows]
                model.get_parameter(f"{host}.experts.linear_fc2.weight{number}").copy_(down)
    return model


def moe_tokens(step: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and the weights of the loss for all ranks' tokens, `[TOKENS, hidden]` each."""
    generator = torch.Generator().manual_seed(11 + step)
    return tuple(torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def moe_plugin(plugin: Any = None) -> SelectedPlugin:
    """The toy architecture, with a plugin object's overrides."""
    return SelectedPlugin.of(ARCHITECTURE, plugin)


__all__ = ["HF_CONFIG", "MoeModel", "hf_weights", "moe_model", "moe_plugin", "moe_tokens"]
