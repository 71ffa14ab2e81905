"""What the LoRA branch costs over the frozen linear, against its share of the FLOPs.

Per linear of a Qwen3 layer and for its four linears together; forward and backward, fp32, one thread. The frozen linear
counts 4 T in out FLOPs (forward and dX), the branch 6 T r (n in + out) (forward, dA, dB and dX of n stacked
projections). `overhead` is the branch's time over the time of the frozen linear's two matmuls, `ratio` is overhead over
share of the FLOPs. `bare` is the same ratio for the branch's own matmuls alone, on contiguous operands that are
allocated beforehand: what this machine's BLAS leaves room for.

The branch is attached by the SDK in both of two ways to time it. `ratio`: around a linear that costs nothing (see
free_linear), with a swept cache. `in_step`: the difference that it makes on the torch reference host's own linears,
with its standard error `+-`, which a busy machine makes large.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.command import arguments
from benchmarks.measure import excess, excess_error, interleaved, prepare
from benchmarks.qwen3_layer import AdaptedSite, adapted_sites
from benchmarks.report import Goal, write_report

GOAL = 1.3


def frozen_products(site: AdaptedSite) -> Callable[[], None]:
    """The frozen linear's two matmuls."""
    x, grad, weight = site.x.detach()[:, 0], site.grad[:, 0], site.weight.detach()
    output, grad_x = torch.empty_like(grad), torch.empty_like(x)

    def products() -> None:
        torch.mm(x, weight.t(), out=output)
        torch.mm(grad, weight, out=grad_x)

    return products


def bare_products(site: AdaptedSite) -> Callable[[], None]:
    """The branch's matmuls, each on contiguous operands, results in place."""
    x, a = site.x.detach()[:, 0], site.module.lora.a.detach()
    bs = [b.detach() for b in site.module.lora.bs]
    s, grad_a, grad_x = torch.empty(len(x), len(a)), torch.empty_like(a), torch.zeros_like(x)
    parts = [torch.randn(len(x), site.rank) for _ in bs]
    grads = [torch.randn(len(x), len(b)) for b in bs]
    deltas, grad_bs = [torch.zeros_like(grad) for grad in grads], [torch.empty(b.shape[1], len(b)) for b in bs]

    def products() -> None:
        torch.mm(x, a.t(), out=s)
        for part, b, delta in zip(parts, bs, deltas, strict=True):
            delta.addmm_(part, b.t())
        for part, b, grad, grad_b in zip(parts, bs, grads, grad_bs, strict=True):
            torch.mm(part.t(), grad, out=grad_b)
            torch.mm(grad, b, out=part)
        torch.mm(s.t(), x, out=grad_a)
        grad_x.addmm_(s, a)

    return products


def measure_layer(hidden: int, ranks: Sequence[int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of one hidden size: per rank, every linear and the layer."""
    rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
    hosts = [adapted_sites(hidden=hidden, rank=rank, tokens=tokens) for rank in ranks]
    frees = [adapted_sites(hidden=hidden, rank=rank, tokens=tokens, free=True) for rank in ranks]
    for of_linear, free_linear in zip(zip(*hosts, strict=True), zip(*frees, strict=True), strict=True):
        alone = interleaved(
            _steps(free_linear) | {str(one.rank): bare_products(one) for one in free_linear}, rounds, cold=True
        )
        in_step = interleaved(_steps(of_linear) | {"frozen": frozen_products(of_linear[0])}, rounds)
        for site in of_linear:
            on = f"on {site.rank}"
            rows[site.rank].append(
                {
                    "hidden": hidden,
                    "rank": site.rank,
                    "linear": site.name,
                    "frozen_ms": 1e3 * median(in_step["frozen"]),
                    "branch_ms": 1e3 * excess(alone, on, "off"),
                    "bare_ms": 1e3 * median(alone[str(site.rank)]),
                    "in_step_ms": 1e3 * excess(in_step, on, "off"),
                    "error_ms": 1e3 * excess_error(in_step, on, "off"),
                    "flops": site.base_flops,
                    "branch_flops": site.branch_flops,
                }
            )
    return [ratios(row) for rank in ranks for row in (*rows[rank], layer_row(rows[rank]))]


def _steps(sites: Sequence[AdaptedSite]) -> dict[str, Callable[[], object]]:
    """The same linear without adapter and with the adapter of each rank."""
    steps: dict[str, Callable[[], object]] = {"off": partial(sites[0].step, adapted=False)}
    return steps | {f"on {site.rank}": partial(site.step, adapted=True) for site in sites}


def layer_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The linears of a layer together."""
    summed = {key: sum(row[key] for row in rows) for key, value in rows[0].items() if key.endswith(("_ms", "flops"))}
    error = math.hypot(*(row["error_ms"] for row in rows))
    return {**rows[0], "linear": "layer", **summed, "error_ms": error}


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the FLOP share and ratios in place of the FLOPs."""
    kept = {key: value for key, value in row.items() if not key.endswith("flops")}
    share = row["branch_flops"] / row["flops"]
    return {
        **kept,
        "share_%": 100 * share,
        "overhead_%": 100 * row["branch_ms"] / row["frozen_ms"],
        **{
            name: row[f"{of}_ms"] / row["frozen_ms"] / share
            for name, of in (("ratio", "branch"), ("bare", "bare"), ("in_step", "in_step"), ("+-", "error"))
        },
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes to measure."""
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048], help="hidden sizes")
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 32, 64], help="LoRA ranks")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in the batch")


def main() -> None:
    """Measure every size and write branch_cost.json."""
    given = arguments(__doc__, rounds=9, more=options)
    prepare()
    rows = []
    for hidden in given.hidden:
        rows += measure_layer(hidden, given.rank, given.tokens, given.rounds)
    goals = [
        Goal(
            what=f"branch overhead over its FLOP share, layer of hidden {row['hidden']}, rank {row['rank']}",
            bound=GOAL,
            measured=row["ratio"],
        )
        for row in rows
        if row["linear"] == "layer"
    ]
    write_report(given.output / "branch_cost.json", given=vars(given), rows=rows, goals=goals)


if __name__ == "__main__":
    main()
