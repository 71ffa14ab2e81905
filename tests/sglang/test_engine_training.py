"""Whole runs with rollouts on the real SGLang, in both modes: versions, gaps, gate, and what is left behind.

The trainer is a process of its own, run by the interpreter of the environment variable `LORA_TRAINER_PYTHON`, whose
torch may be another one than SGLang's (`make test-sglang` gives that of `.venv`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hybrid_models
import inkling_models
import psutil
import pytest
from engine_processes import killed_while_it_draws
from own_process import OwnProcess
from safetensors.torch import load_file

from lora_harness.config import dump_config, parse_config
from lora_harness.quickstart.base_model import make_base
from lora_harness.quickstart.model import model_config
from lora_harness.quickstart.recipe import BaseRecipe, training_config
from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer
from lora_harness.report import Summary

# Starting an engine takes minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
TARGETS = ["all-linear", "embed_tokens", "lm_head"]
HERE = str(Path(__file__).parent)
TRAINER = os.environ.get("LORA_TRAINER_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_base("qwen3", tmp_path_factory)


def quickstart_base(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after one warm-up step: nothing here depends on its being right."""
    folder = tmp_path_factory.mktemp("base") / "base"
    recipe = BaseRecipe(model=model_config(model), target=0.0, check_every=1, max_steps=1)
    make_base(folder, seed=0, recipe=recipe, replaced=folder.with_name("replaced"), say=lambda text: None)
    return folder


@pytest.fixture(scope="module")
def hybrid(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid with the quickstart's tokens, and the keys in config.json that transformers writes: SGLang's own
    keys are the harness's to add."""
    folder = tmp_path_factory.mktemp("hybrid")
    reference.run(hybrid_models.make_hybrid, str(folder), vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("full_attention_interval", "partial_rotary_factor"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def padded_inkling(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Inkling as it is published, with the quickstart's tokens and rows of padding after them."""
    folder = tmp_path_factory.mktemp("inkling")
    tokens = len(VOCABULARY)
    reference.run(inkling_models.make_inkling, str(folder), vocab_size=tokens + 10, unpadded_vocab_size=tokens)
    build_tokenizer().save_pretrained(folder)
    return folder


def train(
    base: Path,
    output: Path,
    mode: str,
    *,
    lora: Mapping[str, Any] | None = None,
    expert_ranks: int = 1,
    kill: bool = False,
    **rollout: Any,
) -> subprocess.CompletedProcess[str]:
    """The quickstart's run, but small, with every target and rewards that differ: the model's sums are all wrong.

    Args:
        kill: whether its engine is killed once, while completions of the second step are drawn.
    """
    config = training_config(
        base=base, output=output, engine="sglang", seed=0, steps=STEPS, mode=mode, sglang_python=Path(sys.executable)
    )
    raw = config.model_dump(mode="json", exclude_none=True)
    raw["algorithm"] |= {"prompts_per_step": 8, "group_size": 4}
    raw["eval"] |= {"count": 8, "samples": 1}
    raw["task"]["reward"] = "rewards:first_digit_is_even"
    raw["rollout"] |= {"max_batch_size": 32, **rollout}
    raw["parallel"]["ep"] = expert_ranks
    raw["lora"] |= {"target_modules": TARGETS, **(lora or {})}
    file = output.with_suffix(".toml")
    file.write_text(dump_config(parse_config(raw)))
    start = ["-m"]
    if expert_ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={expert_ranks}", "-m"]
    with killed_while_it_draws(output / "sglang" / "engine-0.log", output / "metrics.jsonl") if kill else nullcontext():
        return subprocess.run(
            [TRAINER, *start, "lora_harness", "train", str(file)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def learnt(adapter: Mapping[str, Any], leaf: str) -> bool:
    """Whether a module of this name has an effect: B begins at zero, of an embedding A does."""
    begins_at_zero = "lora_embedding_A" if leaf == "embed_tokens" else "lora_B"
    return any(bool(one.any()) for name, one in adapter.items() if f"{leaf}.{begins_at_zero}" in name)


def engines_of(output: Path) -> list[int]:
    """Processes that still serve a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(output / "sglang") in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


@pytest.mark.parametrize("mode", ["adapter", "merge"])
def test_trainer_and_engine_stay_one_policy(base: Path, tmp_path: Path, mode: str) -> None:
    """B36, B37: a policy that does not arrive, or rollouts of the base, would open the gap at once."""
    output = tmp_path / "run"
    done = train(base, output, mode)
    assert done.returncode == 0, done.stdout
    found = rows(output)
    assert [row["adapter_version"] for row in found] == [1, 2, 3]
    assert all(row["bytes_synced"] > 0 for row in found) and max(row["kl"] for row in found) > 1e-3, "it moved"
    assert max(row["logprob_gap_max"] for row in found) <= 1e-4
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    assert learnt(adapter, "embed_tokens") and learnt(adapter, "lm_head")
    assert Summary.read(output).steps == STEPS
    assert "SGLang engine 0 serves" in done.stdout
    assert "largest log-prob gap between trainer and engine: mean" in done.stdout
    assert not engines_of(output)


@pytest.mark.parametrize(("mode", "expert_ranks"), [("merge", 2), ("adapter", 2)])
def test_a_hybrid_is_one_policy(hybrid: Path, tmp_path: Path, mode: str, expert_ranks: int) -> None:
    """B26, B31, B36: experts, gated queries and delta nets arrive on the engine after every step. The gates of delta
    nets learn where the engine serves them, merged, and stay exactly zero where it does not, as an adapter.

    B40: merged, also on an engine that was started again after it died in the hands of both ranks.
    """
    output = tmp_path / "run"
    kill = mode == "merge"
    # A head's gates are four rows wide, so no higher rank fits. With more tokens an engine can be killed on the way.
    done = train(
        hybrid,
        output,
        mode,
        lora={"rank": 4},
        expert_ranks=expert_ranks,
        kill=kill,
        max_batch_size=8,
        max_new_tokens=48 if kill else 5,
    )
    assert done.returncode == 0, done.stdout
    assert ("failed while it drew completions" in done.stdout and "was restarted" in done.stdout) == kill
    found = rows(output)
    assert [row["adapter_version"] for row in found] == [1, 2, 3]
    assert all(row["bytes_synced"] > 0 for row in found) and max(row["kl"] for row in found) > 1e-3, "it moved"
    assert max(row["logprob_gap_max"] for row in found) <= 1e-4
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    moved = {name: bool(one.any()) for name, one in adapter.items() if ".lora_B." in name or "embedding_A" in name}
    gates = {name for name in moved if name.split(".lora_")[0].endswith(("in_proj_b", "in_proj_a"))}
    assert len(gates) == 4, "both gates of both delta nets"
    assert {name for name, one in moved.items() if not one} == (gates if mode == "adapter" else set())
    held = "held at zero, since the engine cannot serve them: linear_attn.in_proj_a, linear_attn.in_proj_b"
    assert (held in done.stdout) == (mode == "adapter")


@pytest.mark.parametrize("mode", ["adapter", "merge"])
def test_an_inkling_is_one_policy_with_every_target_trained(
    reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, mode: str
) -> None:
    """B36: one directory serves trainer and engine, the quickstart's own too; relative states, experts, embedding and
    head arrive."""
    output = tmp_path / "run"
    if mode == "adapter":
        model = padded_inkling(reference, tmp_path_factory)
    else:
        model = quickstart_base("inkling", tmp_path_factory)
    done = train(model, output, mode, lora={"rank": 4, "expert_sharing": "outer"})
    assert done.returncode == 0, done.stdout
    found = rows(output)
    assert [row["adapter_version"] for row in found] == [1, 2, 3]
    assert all(row["bytes_synced"] > 0 for row in found) and max(row["kl"] for row in found) > 1e-4, "it moved"
    assert max(row["logprob_gap_max"] for row in found) <= 1e-4
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    for leaf in ("r_proj", "mlp.experts.up_proj", "shared_experts.down_proj", "embed_tokens", "lm_head"):
        assert learnt(adapter, leaf), leaf


def test_a_gap_above_the_limit_ends_the_run_and_its_engines(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = train(base, output, "adapter", max_logprob_gap=1e-9)
    assert done.returncode == 2 and "Traceback" not in done.stdout
    assert "rollout.max_logprob_gap = 1e-09: trainer and engine differ by more: mean" in done.stdout
    assert len(rows(output)) == 1, "the step is on record"
    assert not engines_of(output)
