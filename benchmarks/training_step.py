"""A LoRA update against a full-parameter update of the same model in the same harness: time and peak memory.

Both are the harness's own update (megatron-core's schedule, GRPO loss, gradient clipping, AdamW) on the same batch, in
fp32 on one thread; the full-parameter one trains the base instead of an adapter. Times are measured side by side in one
process. Peak memory is the largest resident set during the updates, each form in a process of its own, less what the
process holds before it builds the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.command import arguments
from benchmarks.full_parameters import full_policy
from benchmarks.measure import interleaved, prepare
from benchmarks.qwen3_layer import hf_config, one_process
from benchmarks.report import Goal, write_report
from benchmarks.resident import peak_of, resident_mib
from lora_harness.batch import DrawnSequence, StepBatch, pack
from lora_harness.config import TrainConfig, parse_config
from lora_harness.losses import loss_normaliser
from lora_harness.trainer import MegatronPolicy

GOAL = 0.7
FORMS = {"lora": MegatronPolicy, "full": full_policy}


def save_base(folder: Path, hidden: int, layers: int, vocab: int) -> None:
    """A randomly initialised HF checkpoint."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = hf_config(hidden, layers=layers, vocab=vocab)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    Qwen3ForCausalLM(Qwen3Config(**fields)).save_pretrained(folder)


def training_config(base: Path, rank: int, sequences: int) -> TrainConfig:
    """A config of the harness for this model and batch."""
    raw: dict[str, Any] = {
        "model": {"path": str(base)},
        "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
        "steps": 1,
        "lora": {"rank": rank},
        "parallel": {"micro_batch_size": sequences},
    }
    return parse_config(raw)


def batch(sequences: int, length: int, vocab: int) -> StepBatch:
    """Random sequences of `length` inputs, half prompt, half completion."""
    tokens = torch.randint(vocab, (sequences, length + 1), generator=torch.Generator().manual_seed(0)).tolist()
    half = length // 2
    drawn = [DrawnSequence(one[:half], one[half:], [-1.0] * len(one[half:])) for one in tokens]
    advantages = torch.linspace(-1, 1, sequences)
    return pack(drawn, advantages, pad_id=0, multiple=1, device=torch.device("cpu"))


def update(policy: MegatronPolicy, data: StepBatch) -> None:
    """One optimizer update on the whole batch."""
    policy.update(
        data,
        range(len(data.inputs)),
        normaliser=loss_normaliser("token", data.lengths, max(data.lengths)),
        lr=1e-5,
        ref_logprobs=torch.zeros(data.inputs.shape),
        old_logprobs=None,
    )


def peak_memory(given: argparse.Namespace, base: Path, form: str) -> float:
    """MiB that one form adds at its peak, measured in a new process."""
    sizes = [
        str(value) for name in ("rank", "sequences", "length", "vocab") for value in (f"--{name}", vars(given)[name])
    ]
    command = [sys.executable, "-m", "benchmarks.training_step", "--peak-of", form, "--base", str(base), *sizes]
    command += ["--output", str(given.output)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])["mib"]


def print_peak(given: argparse.Namespace) -> None:
    """In that process: build one form, update three times, print the peak."""
    torch.set_num_threads(1)
    run, data = one_process(), batch(given.sequences, given.length, given.vocab)
    before = resident_mib()
    policy = FORMS[given.peak_of](training_config(given.base, given.rank, given.sequences), run)
    peak = peak_of(lambda: [update(policy, data) for _ in range(3)])
    print(json.dumps({"mib": peak - before}))


def options(parser: argparse.ArgumentParser) -> None:
    """Model and batch."""
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--layers", type=int, default=2, help="layers")
    parser.add_argument("--vocab", type=int, default=2048, help="vocabulary")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank")
    parser.add_argument("--sequences", type=int, default=16, help="sequences in the batch, one microbatch")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    # For the processes that this benchmark starts to measure memory.
    parser.add_argument("--peak-of", choices=list(FORMS), help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)


def main() -> None:
    """Measure both forms and write training_step.json."""
    given = arguments(__doc__, rounds=7, more=options)
    if given.peak_of:
        print_peak(given)
        return
    prepare()
    with TemporaryDirectory() as folder:
        base = Path(folder)
        save_base(base, given.hidden, given.layers, given.vocab)
        memory = {form: peak_memory(given, base, form) for form in FORMS}
        config, run = training_config(base, given.rank, given.sequences), one_process()
        policies = {name: form(config, run) for name, form in FORMS.items()}
    data = batch(given.sequences, given.length, given.vocab)
    seconds = interleaved({name: partial(update, policy, data) for name, policy in policies.items()}, given.rounds)
    rows = [{"form": form, "seconds": median(seconds[form]), "peak_mib": memory[form]} for form in FORMS]
    ratio = median(a / b for a, b in zip(seconds["lora"], seconds["full"], strict=True))
    goals = [
        Goal(what="time of a LoRA update over a full-parameter update", bound=GOAL, measured=ratio),
        Goal(
            what="peak memory of a LoRA update over a full-parameter update",
            bound=1.0,
            measured=memory["lora"] / memory["full"],
        ),
    ]
    write_report(given.output / "training_step.json", given=vars(given), rows=rows, goals=goals)


if __name__ == "__main__":
    main()
