"""Bytes that adapters communicate in a step under TP2 with sequence parallelism, against gathering hidden states.

Every collective of torch.distributed is counted as it is called, in forward and backward of a Qwen3 layer. The branch's
bytes are those of the adapted model less those of the same model with the adapter off. Three forms:

- ours: the r-wide product is gathered or reduced;
- fused: column-parallel linears gather the hidden states once for all projections they pack, row-parallel ones reduce
  a delta as wide as the hidden state;
- single: the same, with an adapter of its own for each projection (as on unfused linears).

A call counts the bytes of its full tensor: an all-gather's result, a reduce-scatter's or an all-reduce's input.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.command import arguments
from benchmarks.counted_collectives import CountedCollectives
from benchmarks.hidden_wide import HiddenWide
from benchmarks.qwen3_layer import hf_config, randomize
from benchmarks.report import Goal, write_report
from lora_plugins_sdk import LoraConfig, SelectedPlugin, attach, detach, disable_adapters, load_plugin, reduce_grads
from lora_plugins_sdk.testing import Layout, close_pool, current_run, run_world


def measure_on_rank(hidden: int, rank: int, tokens: int) -> dict[str, dict[str, int]]:
    """Bytes of one step on this rank: `base`, and for each form its `branch` and `gradient_sum`."""
    import torch

    run, config, qwen3 = current_run(), hf_config(hidden), load_plugin("qwen3")
    model: Any = qwen3.build_model(config, run, torch.float32)
    randomize(model)
    # With the adapter off nothing would need a gradient, and the base's own backward could not be counted.
    model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    inputs = torch.arange(tokens)[None] % config["vocab_size"]

    def step() -> tuple[int, torch.Tensor]:
        with CountedCollectives() as counted:
            logits = model(inputs, torch.arange(tokens)[None], None)
            logits.square().mean().backward()
        return counted.bytes, logits.detach()

    forms: dict[str, SelectedPlugin] = {"ours": qwen3}
    for name, shared in (("fused", True), ("single", False)):
        forms[name] = SelectedPlugin.of(qwen3.architecture, HiddenWide(shared_input=shared))
    found: dict[str, dict[str, int]] = {}
    outputs = []
    for name, plugin in forms.items():
        adapter = attach(model, plugin, config, LoraConfig(rank=rank), run)
        for handle in adapter.handles:
            randomize(handle.factors)
        with disable_adapters(model):
            base, _ = step()
        total, output = step()
        outputs.append(output)
        with CountedCollectives() as counted:
            reduce_grads(model)
        found[name] = {"base": base, "branch": total - base, "gradient_sum": counted.bytes}
        detach(model)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes to measure."""
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 32], help="LoRA ranks")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in the batch")


def main() -> None:
    """Count and write communication.json."""
    given = arguments(__doc__, more=options)
    rows, goals = [], []
    for rank in given.rank:
        forms = run_world(
            measure_on_rank, Layout(tp=2, sequence_parallel=True), given.hidden, rank, given.tokens, timeout=300
        )[0]
        ours = forms["ours"]["branch"]
        rows += [
            {"hidden": given.hidden, "rank": rank, "form": name, **form, "ours_over_it": ours / form["branch"]}
            for name, form in forms.items()
        ]
        goals.append(
            Goal(
                what=f"bytes of our branch over gathered hidden states, an adapter per projection, rank {rank} (r/h)",
                bound=rank / given.hidden,
                measured=ours / forms["single"]["branch"],
            )
        )
    close_pool()
    write_report(given.output / "communication.json", given=vars(given), rows=rows, goals=goals)


if __name__ == "__main__":
    main()
