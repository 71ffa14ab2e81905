"""What the LoRA branch costs against the same adapter in other forms.

`separate`: on the same host linears, concatenated A's, a linear per slice, concatenation, scale, add. `peft`: PEFT's
layers on the unfused linears of the HF model. Per linear of a Qwen3 layer and together; forward and backward, fp32, one
thread. Around linears that cost nothing (see free_linear), less those linears' own time; `.._x` is a form's cost over
ours.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.command import arguments
from benchmarks.measure import excess, interleaved, prepare
from benchmarks.other_forms import linears_step, separate_operations, unfused_linears, with_peft
from benchmarks.qwen3_layer import AdaptedSite, adapted_sites
from benchmarks.report import Goal, write_report

GOAL = 1.5


def measure_site(site: AdaptedSite, rounds: int) -> dict[str, float]:
    """Milliseconds that each form of the branch adds."""
    seconds = interleaved(
        {
            "off": lambda: site.step(adapted=False),
            "ours": lambda: site.step(adapted=True),
            "separate": separate_operations(site),
            "unfused": linears_step(unfused_linears(site), site),
            "peft": linears_step(with_peft(unfused_linears(site), site), site),
        },
        rounds,
        cold=True,
    )
    return {
        "ours_ms": 1e3 * excess(seconds, "ours", "off"),
        "separate_ms": 1e3 * excess(seconds, "separate", "off"),
        "peft_ms": 1e3 * excess(seconds, "peft", "unfused"),
    }


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """The row with both costs over ours."""
    return {**row, "separate_x": row["separate_ms"] / row["ours_ms"], "peft_x": row["peft_ms"] / row["ours_ms"]}


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes to measure."""
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024], help="hidden sizes")
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 32], help="LoRA ranks")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in the batch")


def main() -> None:
    """Measure every size and write branch_forms.json."""
    given = arguments(__doc__, rounds=15, more=options)
    prepare()
    rows: list[dict[str, Any]] = []
    goals = []
    for hidden in given.hidden:
        for rank in given.rank:
            sites = adapted_sites(hidden=hidden, rank=rank, tokens=given.tokens, free=True)
            measured = {site.name: measure_site(site, given.rounds) for site in sites}
            measured["layer"] = {key: sum(row[key] for row in measured.values()) for key in measured[sites[0].name]}
            here = [
                ratios({"hidden": hidden, "rank": rank, "linear": name, **values}) for name, values in measured.items()
            ]
            rows += here
            for form, words, bound in (("separate", "separate operations", GOAL), ("peft", "PEFT's layers", 1.0)):
                what = f"{words} over our branch, layer of hidden {hidden}, rank {rank}"
                goals.append(Goal(what=what, bound=bound, measured=here[-1][f"{form}_x"], at_least=True))
    write_report(given.output / "branch_forms.json", given=vars(given), rows=rows, goals=goals)


if __name__ == "__main__":
    main()
