"""What the LoRA branch of routed experts costs: as chosen, as a loop over the experts, and all in grouped_mm.

One column-parallel site (gate|up), forward and backward, fp32, one thread, random routing. `loop_x` and `grouped_x` are
those forms' cost over what the SDK chooses; `base_pct` is the branch over the frozen experts' forward and input
gradient, `bare_pct` the branch's matmuls alone over the same, `flops_pct` what their FLOPs would make it. The frozen
experts are taken in the faster of two forms; `base_loop_x` is their loop over it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.command import arguments
from benchmarks.measure import interleaved, prepare
from benchmarks.report import Goal, write_report
from lora_plugins_sdk import grouped_matmul
from lora_plugins_sdk.expert_branch import ExpertBranch, ExpertColumns
from lora_plugins_sdk.grouped_matmul import Groups, grouped_linear, grouped_outer

GOAL = 1.0


def base_steps(x: Tensor, weights: Tensor, grad: Tensor, sizes: list[int]) -> dict[str, Callable[[], None]]:
    """The frozen experts, forward and input gradient: one matmul each, and all in grouped_mm."""
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def loop() -> None:
        torch.cat([one @ weight.t() for one, weight in zip(x.split(sizes), weights, strict=True)])
        torch.cat([one @ weight for one, weight in zip(grad.split(sizes), weights, strict=True)])

    def grouped() -> None:
        F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        F.grouped_mm(grad, weights, offs=ends)

    return {"base_loop": loop, "base_grouped": grouped}


def bare_step(x: Tensor, grad: Tensor, sizes: list[int], width: int, rank: int) -> Callable[[], None]:
    """The branch's matmuls in the SDK's choice of form, on contiguous operands and nothing else."""
    a = torch.randn(len(sizes), 2 * rank, x.shape[1])
    b = torch.randn(len(sizes), width, rank)
    s, part, half = torch.randn(x.shape[0], 2 * rank), torch.randn(x.shape[0], rank), grad[:, :width].contiguous()
    groups = Groups(sizes, x.device)

    def step() -> None:
        grouped_linear(x, a, groups)
        for _ in range(2):
            grouped_linear(part, b, groups)
            grouped_outer(part, half, groups, len(sizes))
            grouped_linear(half, b.transpose(1, 2), groups)
        grouped_outer(s, x, groups, len(sizes))
        grouped_linear(s, a.transpose(1, 2), groups)

    return step


def branch_step(x: Tensor, grad: Tensor, sizes: list[int], width: int, rank: int, form: str) -> Callable[[], None]:
    """The branch around a buffer that costs nothing."""
    experts = len(sizes)
    a = nn.Parameter(torch.randn(experts, 2 * rank, x.shape[1]))
    bs = [nn.Parameter(torch.randn(experts, width, rank)) for _ in range(2)]
    columns = ExpertColumns(spans=((0, width), (width, width)))
    output, at = torch.zeros(x.shape[0], 2 * width), x.clone().requires_grad_()
    forced = {"loop": False, "grouped": True}.get(form)

    def step() -> None:
        ExpertBranch.apply(output, at, Groups(sizes, x.device), columns, 2.0, a, *bs).backward(grad)  # type: ignore[attr-defined]
        at.grad = None
        for parameter in (a, *bs):
            parameter.grad = None

    def as_forced() -> None:
        with patch.object(grouped_matmul, "use_grouped_mm", lambda *args, **kwargs: forced):
            step()

    return step if forced is None else as_forced


def measure(experts: int, rank: int, tokens: int, hidden: int, width: int, rounds: int) -> dict[str, Any]:
    """One row: costs and ratios at one size."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.multinomial(torch.rand(experts, generator=draw), tokens, replacement=True, generator=draw)
    counts = sizes.bincount(minlength=experts).tolist()
    x, grad = torch.randn(tokens, hidden, generator=draw), torch.randn(tokens, 2 * width, generator=draw)
    weights = torch.randn(experts, 2 * width, hidden, generator=draw)
    forms = base_steps(x, weights, grad, counts) | {"bare": bare_step(x, grad, counts, width, rank)}
    forms |= {form: branch_step(x, grad, counts, width, rank, form) for form in ("chosen", "loop", "grouped")}
    seconds = {form: statistics.median(taken) for form, taken in interleaved(forms, rounds).items()}
    base = min(seconds["base_loop"], seconds["base_grouped"])
    # Forward: A and B once. Backward: each twice, for its own gradient and for what flows on.
    flops = 3 * (2 * rank * hidden + 2 * width * rank) / (2 * 2 * width * hidden)
    return {
        "experts": experts,
        "rank": rank,
        "tokens": tokens,
        "chosen_ms": 1e3 * seconds["chosen"],
        "loop_x": seconds["loop"] / seconds["chosen"],
        "grouped_x": seconds["grouped"] / seconds["chosen"],
        "base_loop_x": seconds["base_loop"] / base,
        "base_pct": 100 * seconds["chosen"] / base,
        "bare_pct": 100 * seconds["bare"] / base,
        "flops_pct": 100 * flops,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes to measure."""
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 256], help="numbers of experts")
    parser.add_argument("--rank", type=int, nargs="+", default=[8, 32], help="LoRA ranks")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="tokens of all experts")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size")
    parser.add_argument("--width", type=int, default=128, help="intermediate size of an expert")


def main() -> None:
    """Measure every size and write grouped_experts.json."""
    given = arguments(__doc__, rounds=9, more=options)
    prepare()
    rows = [
        measure(experts, rank, tokens, given.hidden, given.width, given.rounds)
        for experts in given.experts
        for rank in given.rank
        for tokens in given.tokens
    ]
    goals = [
        Goal(
            what=f"{row['experts']} experts, rank {row['rank']}, {row['tokens']} tokens: loop over chosen",
            bound=GOAL,
            measured=row["loop_x"],
            at_least=True,
        )
        for row in rows
    ]
    write_report(given.output / "grouped_experts.json", given=vars(given), rows=rows, goals=goals)


if __name__ == "__main__":
    main()
