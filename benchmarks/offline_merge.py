"""An offline merge against `cp -r` of the same base: throughput, and peak memory against the largest weight file.

The base is made here: bfloat16 weights of Qwen3's shapes in files of equal size, with an adapter on every linear, so
that every weight but the embedding is changed. A merge works on as many files at once as there are processors, with one
torch thread each. All forms run in turn in each round. A merge makes its output durable
before it appears, so `cp -r` is timed with and without that. Seconds are by the clock, which other work on the machine
disturbs; `cpu_seconds` are those of the process and of `cp`, the kernel's work for them included. Peak memory is the
largest resident set during the merge, in a process of its own, less what it held before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from benchmarks.command import arguments
from benchmarks.report import Goal, write_report
from benchmarks.resident import peak_of, resident_mib
from lora_plugins_sdk.offline.merge import merge, plan_merge

RANK = 16
THROUGHPUT_GOAL, MEMORY_GOAL = 0.5, 1.0


def save_base(base: Path, adapter: Path, gigabytes: float, files: int, hidden: int) -> None:
    """A base of about this size, and its adapter."""
    base.mkdir()
    adapter.mkdir()
    inner = 3 * hidden
    shapes = {
        "self_attn.q_proj": (2 * hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, 2 * hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = max(files, round(gigabytes * 1e9 / (2 * sum(out * width for out, width in shapes.values()))))
    factors: dict[str, torch.Tensor] = {}
    placed: dict[str, str] = {}
    for number in range(files):
        part: dict[str, torch.Tensor] = {}
        for layer in range(layers * number // files, layers * (number + 1) // files):
            for name, (out, width) in shapes.items():
                module = f"model.layers.{layer}.{name}"
                part[f"{module}.weight"] = torch.empty(out, width, dtype=torch.bfloat16).normal_(std=0.02)
                factors[f"base_model.model.{module}.lora_A.weight"] = torch.empty(RANK, width).normal_(std=0.02)
                factors[f"base_model.model.{module}.lora_B.weight"] = torch.empty(out, RANK).normal_(std=0.001)
        if number == 0:
            part["model.embed_tokens.weight"] = torch.empty(4096, hidden, dtype=torch.bfloat16).normal_(std=0.02)
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, base / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (base / "config.json").write_text(json.dumps({"model_type": "benchmark", "tie_word_embeddings": False}))
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}))


def copy(base: Path, output: Path, *, durable: bool) -> None:
    """`cp -r`, and then each file flushed to the disk."""
    subprocess.run(["cp", "-r", str(base), str(output)], check=True)
    if durable:
        for path in [*output.iterdir(), output]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def clocked(
    forms: Mapping[str, Callable[[Path], object]], folder: Path, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(seconds by the clock, CPU seconds) of every form in every round, after one round that is not counted."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, form in forms.items():
            output = folder / "output"
            start, cpu = time.perf_counter(), sum(os.times()[:4])
            form(output)
            spent = time.perf_counter() - start, sum(os.times()[:4]) - cpu
            shutil.rmtree(output)
            if number:
                taken[name].append(spent)
    return taken


def peak_memory(given: argparse.Namespace, base: Path, adapter: Path, output: Path) -> float:
    """MiB that a merge adds at its peak, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.offline_merge", "--peak-of", str(base), str(adapter), str(output)]
    printed = subprocess.run([*command, "--output", str(given.output)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(printed.stdout.splitlines()[-1])["mib"]


def print_peak(base: Path, adapter: Path, output: Path) -> None:
    """In that process: merge once and print the peak."""
    before = resident_mib()
    peak = peak_of(lambda: merge(plan_merge(base, adapter, output)))
    print(json.dumps({"mib": peak - before}))


def options(parser: argparse.ArgumentParser) -> None:
    """The base."""
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of the base")
    parser.add_argument("--files", type=int, default=4, help="weight files of the base")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--folder", type=Path, help="where to make everything (default: the system's temporary files)")
    # For the process that this benchmark starts to measure memory.
    parser.add_argument("--peak-of", type=Path, nargs=3, help=argparse.SUPPRESS)


def main() -> None:
    """Measure and write offline_merge.json."""
    given = arguments(__doc__, rounds=5, more=options)
    if given.peak_of:
        print_peak(*given.peak_of)
        return
    torch.set_num_threads(1)
    with TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        base, adapter = folder / "base", folder / "adapter"
        save_base(base, adapter, given.gigabytes, given.files, given.hidden)
        sizes = [path.stat().st_size for path in base.glob("*.safetensors")]
        peak = peak_memory(given, base, adapter, folder / "peak")
        shutil.rmtree(folder / "peak")
        forms: dict[str, Callable[[Path], object]] = {
            "cp -r": lambda output: copy(base, output, durable=False),
            "cp -r, durable": lambda output: copy(base, output, durable=True),
            "merge": lambda output: merge(plan_merge(base, adapter, output)),
        }
        taken = clocked(forms, folder, given.rounds)
    rows = [
        {
            "form": form,
            "seconds": median(clock for clock, _ in spent),
            "cpu_seconds": median(cpu for _, cpu in spent),
            "gigabytes_a_second": sum(sizes) / 1e9 / median(clock for clock, _ in spent),
            "merge_over_it": median(ours[0] / it[0] for ours, it in zip(taken["merge"], spent, strict=True)),
        }
        for form, spent in taken.items()
    ]
    goals = [
        Goal(
            what="throughput of a merge over that of `cp -r` made durable",
            bound=THROUGHPUT_GOAL,
            measured=median(it[0] / ours[0] for ours, it in zip(taken["merge"], taken["cp -r, durable"], strict=True)),
            at_least=True,
        )
    ]
    goals.append(
        Goal(
            what="peak memory of a merge over the largest weight file",
            bound=MEMORY_GOAL,
            measured=peak * 2**20 / max(sizes),
        )
    )
    shown = {**vars(given), "bytes": sum(sizes), "largest_file": max(sizes), "peak_mib": peak}
    write_report(given.output / "offline_merge.json", given=shown, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
