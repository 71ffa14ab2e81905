"""Every plugin's model: three updates, a checkpoint on disk, three more under another topology, against six at once.

A plugin joins by its line in `PLUGINS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoint import small_state
from torch import Tensor

from lora_harness.batch import DrawnSequence, StepBatch, pack
from lora_harness.checkpoint import read_checkpoint, read_state, write_checkpoint
from lora_harness.config import TrainConfig, parse_config
from lora_harness.losses import loss_normaliser
from lora_harness.ranks import is_first_rank
from lora_harness.trainer import MegatronPolicy
from lora_plugins_sdk import load_plugin
from lora_plugins_sdk.testing import Layout, current_run, run_world

pytestmark = [pytest.mark.world, pytest.mark.slow]
DENSE = (Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=2))
EXPERTS = (
    Layout(),
    Layout(dp=2, ep=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, etp=1, ep=2, sequence_parallel=True),
)
# Model type -> layouts that a run continues under.
PLUGINS: dict[str, tuple[Layout, ...]] = {
    "qwen3": DENSE,
    "qwen3_moe": (EXPERTS[-1], Layout(pp=2)),
    "qwen3_5_moe_text": (*EXPERTS, Layout(pp=2)),
    "inkling_text": EXPERTS,
}
CASES = [pytest.param(plugin, layout, id=f"{plugin}-{layout}") for plugin, some in PLUGINS.items() for layout in some]
# The layout that a run begins under which one process continues.
WRITERS = [
    pytest.param(plugin, DENSE[-2] if some is DENSE else EXPERTS[-1], id=plugin) for plugin, some in PLUGINS.items()
]
CUT, UPDATES = 3, 6
# These make each number in the order in which one process makes it.
SAME_ARITHMETIC = (Layout(), Layout(pp=2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The plugin's own tiny config with random weights, as HF directories."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directories = {}
    for plugin in PLUGINS:
        config: dict[str, Any] = dict(load_plugin(plugin).architecture.tiny_config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        for parameter in model.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        directories[plugin] = tmp_path_factory.mktemp(plugin)
        model.save_pretrained(directories[plugin])
    return directories


def config_of(model: Path, layout: Layout) -> TrainConfig:
    return parse_config(
        {
            "model": {"path": str(model)},
            "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
            "steps": UPDATES,
            "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["all-linear", "embed_tokens", "lm_head"]},
            "parallel": {
                "tp": layout.tp,
                "pp": layout.pp,
                "ep": layout.ep,
                "etp": layout.etp,
                "sequence_parallel": layout.sequence_parallel,
            },
            "algorithm": {"kl_coef": 0.1},
        }
    )


def batch_of(step: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    sequences = [
        DrawnSequence(
            torch.randint(40, (3 + i,), generator=generator).tolist(),
            torch.randint(40, (4,), generator=generator).tolist(),
            [-2.0] * 4,
        )
        for i in range(4)
    ]
    advantages = torch.randn(4, generator=generator)
    return pack(sequences, advantages, pad_id=0, multiple=2, device=torch.device("cpu"))


def update(policy: MegatronPolicy, step: int) -> None:
    batch = batch_of(step)
    policy.update(
        batch,
        list(range(4)),
        normaliser=loss_normaliser("token", batch.lengths, 8),
        lr=2e-3,
        ref_logprobs=policy.logprobs(batch, reference=True),
        old_logprobs=None,
    )


def tensors(policy: MegatronPolicy) -> dict[str, Tensor]:
    saved = policy.checkpoint()
    return {**saved.adapter.tensors, **saved.moments}


def straight(model: Path, directory: Path, layout: Layout) -> dict[str, Tensor]:
    """Six updates, with a checkpoint after three."""
    policy = MegatronPolicy(config_of(model, layout), current_run())
    for step in range(UPDATES):
        if step == CUT:
            saved = policy.checkpoint()
            if is_first_rank():
                write_checkpoint(directory, saved, small_state(CUT))
        update(policy, step)
    return tensors(policy)


def resumed(model: Path, directory: Path, layout: Layout) -> dict[str, dict[str, Tensor]]:
    """What is loaded, and what three more updates make of it."""
    policy = MegatronPolicy(config_of(model, layout), current_run())
    state = read_state(directory)
    policy.restore(read_checkpoint(directory, state), updates=state.updates)
    loaded = tensors(policy)
    for step in range(CUT, UPDATES):
        update(policy, step)
    return {"loaded": loaded, "trained": tensors(policy)}


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Of each plugin the checkpoint and the end of the straight run."""
    found = {}
    for plugin, model in models.items():
        directory = tmp_path_factory.mktemp(f"{plugin}-run") / "checkpoint"
        found[plugin] = (directory, run_world(straight, Layout(), model, directory, Layout())[0])
    return found


@pytest.mark.parametrize(("plugin", "layout"), CASES)
def test_resume_under_another_topology(
    models: dict[str, Path], runs: dict[str, tuple[Path, dict[str, Tensor]]], plugin: str, layout: Layout
) -> None:
    """B15, B16, B18, B22: loaded bit for bit on every rank, trained on as if it had never stopped."""
    directory, expected = runs[plugin]
    saved = read_checkpoint(directory, read_state(directory))
    stored: dict[str, Any] = {**saved.adapter.tensors, **saved.moments}
    for rank in run_world(resumed, layout, models[plugin], directory, layout):
        assert rank["loaded"].keys() == rank["trained"].keys() == expected.keys() == stored.keys()
        for name, tensor in expected.items():
            assert torch.equal(rank["loaded"][name], stored[name]), name
            assert stored[name].any() and not torch.equal(tensor, stored[name]), f"{name} was not trained"
            allowed = 0.0 if layout in SAME_ARITHMETIC else 1e-6
            assert (rank["trained"][name] - tensor).abs().max() <= allowed, name


@pytest.mark.parametrize(("plugin", "layout"), WRITERS)
def test_resume_on_one_process(
    models: dict[str, Path],
    runs: dict[str, tuple[Path, dict[str, Tensor]]],
    tmp_path: Path,
    plugin: str,
    layout: Layout,
) -> None:
    """The way back: what several ranks wrote, experts and their moments from all of them, one process goes on with."""
    model, directory, (_, expected) = models[plugin], tmp_path / "checkpoint", runs[plugin]
    run_world(straight, layout, model, directory, layout)
    saved = read_checkpoint(directory, read_state(directory))
    stored: dict[str, Any] = {**saved.adapter.tensors, **saved.moments}
    (found,) = run_world(resumed, Layout(), model, directory, Layout())
    assert found["loaded"].keys() == found["trained"].keys() == stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found["loaded"][name], stored[name]), name
        # Adam divides a gradient by its own size, in a first update also one of rounding alone. An update is 2e-3.
        assert (found["trained"][name] - tensor).abs().max() <= 1e-5, name
