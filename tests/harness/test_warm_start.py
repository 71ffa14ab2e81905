"""Training that begins with an adapter: the factors, the reference, and what stays behind with weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_run import TARGETS, config_of, write_model
from torch import Tensor

from lora_harness.batch import DrawnSequence, StepBatch, pack
from lora_harness.config import TrainConfig
from lora_harness.losses import loss_normaliser
from lora_harness.trainer import MegatronPolicy
from lora_plugins_sdk import PeftAdapter, read_adapter, write_adapter
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing import Layout, WorldError, current_run, run_world

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the base."""
    directory = tmp_path_factory.mktemp("warm")
    run_world(write_random_adapter, Layout(), config_of(model, directory / "run"), directory)
    return directory


def write_random_adapter(config: TrainConfig, directory: Path) -> None:
    fresh = MegatronPolicy(config, current_run()).export()
    generator = torch.Generator().manual_seed(8)
    tensors = {name: torch.randn(one.shape, generator=generator) * 0.2 for name, one in fresh.tensors.items()}
    write_adapter(PeftAdapter(tensors=tensors, config=fresh.config), directory)


def batch_of() -> StepBatch:
    sequences = [DrawnSequence([3, 4, 5], [6, 7, 8], [-2.0] * 3), DrawnSequence([5, 9], [4, 3, 11, 2], [-2.0] * 4)]
    advantages = torch.tensor([1.0, -0.5])
    return pack(sequences, advantages, pad_id=0, multiple=2, device=torch.device("cpu"))


def update(policy: MegatronPolicy, batch: StepBatch) -> None:
    policy.update(
        batch,
        [0, 1],
        normaliser=loss_normaliser("token", batch.lengths, 8),
        lr=1e-2,
        ref_logprobs=policy.logprobs(batch, reference=True),
        old_logprobs=policy.logprobs(batch, reference=False),
    )


def log_probabilities(config: TrainConfig) -> dict[str, Any]:
    """Of the policy and its reference, before and after an update, and the factors in between."""
    policy, batch = MegatronPolicy(config, current_run()), batch_of()
    found: dict[str, Any] = {"loaded": dict(policy.export().tensors)}
    for name in ("before", "after"):
        found[name] = {
            "policy": policy.logprobs(batch, reference=False),
            "reference": policy.logprobs(batch, reference=True),
            "policy again": policy.logprobs(batch, reference=False),
        }
        update(policy, batch)
    return found


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Log-probabilities of the base."""
    fresh = run_world(log_probabilities, Layout(), config_of(model, tmp_path_factory.mktemp("out") / "run"))
    return fresh[0]["before"]["reference"]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_the_reference_is_the_frozen_warm_start_adapter(
    model: Path, adapter: Path, base: Tensor, tmp_path: Path, layout: Layout
) -> None:
    """B14, B43: the factors are the file's, and switching the trained adapter off does not give the reference."""
    config = config_of(model, tmp_path / "run", layout, warm_start={"adapter": str(adapter)})
    (found, *_) = run_world(log_probabilities, layout, config)
    stored = read_adapter(adapter).tensors
    assert found["loaded"].keys() == stored.keys()
    assert all(torch.equal(found["loaded"][name], one) for name, one in stored.items())
    before, after = found["before"], found["after"]
    assert torch.equal(before["policy"], before["reference"])
    assert torch.equal(after["reference"], before["reference"])
    assert (after["policy"] - after["reference"]).abs().max() > 1e-3
    assert torch.equal(after["policy"], after["policy again"])
    assert (before["reference"] - base).abs().max() > 1e-2


def test_the_reference_may_be_the_base(model: Path, adapter: Path, base: Tensor, tmp_path: Path) -> None:
    warm = {"adapter": str(adapter), "reference": "base"}
    (found,) = run_world(log_probabilities, Layout(), config_of(model, tmp_path / "run", warm_start=warm))
    for when in ("before", "after"):
        assert torch.equal(found[when]["reference"], base)
    assert (found["before"]["policy"] - base).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 8, "alpha": 8.0, "target_modules": TARGETS}, "r=4: the attached adapter has 8"),
        ({"rank": 4, "alpha": 4.0, "target_modules": TARGETS}, "lora_alpha=8: the attached adapter has 4.0"),
        (
            {"rank": 4, "alpha": 8.0, "target_modules": TARGETS, "use_rslora": True},
            "use_rslora=False: the attached adapter has True",
        ),
        ({"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}, "has no place in the attached adapter"),
        ({"rank": 4, "alpha": 8.0, "target_modules": [*TARGETS, "lm_head"]}, "is missing from the adapter"),
    ],
)
def test_an_adapter_of_other_options_is_refused(
    model: Path, adapter: Path, tmp_path: Path, lora: dict[str, Any], said: str
) -> None:
    config = config_of(model, tmp_path / "run", warm_start={"adapter": str(adapter)}, lora=lora)
    with pytest.raises(WorldError, match=said):
        run_world(log_probabilities, Layout(), config)


def after_one_update(config: TrainConfig, *, weights_only: bool) -> tuple[dict[str, Tensor], int]:
    """Two policies: one trains and saves; the other takes the checkpoint, or its weights alone, and updates once."""
    first, batch = MegatronPolicy(config, current_run()), batch_of()
    for _ in range(3):
        update(first, batch)
    saved = first.checkpoint()
    second = MegatronPolicy(config, current_run())
    if weights_only:
        second.load_weights(saved.adapter)
    else:
        second.restore(saved, updates=3)
    update(second, batch)
    update(first, batch)
    continued = dict(first.export().tensors)
    moved = {name: one - continued[name] for name, one in second.export().tensors.items()}
    return moved, second.updates


def test_weights_alone_leave_the_moments_behind(model: Path, tmp_path: Path) -> None:
    """B17: restored moments continue the run exactly; weights alone start a fresh AdamW, whose first update has the
    learning rate's size in every entry that has a gradient (Kingma and Ba 2015, bias-corrected)."""
    config = config_of(model, tmp_path / "run")
    ((moved, updates),) = run_world(after_one_update, Layout(), config, weights_only=False)
    assert updates == 4 and all(not one.any() for one in moved.values())
    ((moved, updates),) = run_world(after_one_update, Layout(), config, weights_only=True)
    assert updates == 1 and max(one.abs().max() for one in moved.values()) > 1e-3


def save_with_a_trainable_norm(config: TrainConfig) -> str:
    policy = MegatronPolicy(config, current_run())
    update(policy, batch_of())
    if current_run().pp_rank == current_run().facts.pp - 1:
        adapter = policy._built.adapter
        adapter.chunks[0].get_parameter("decoder.final_layernorm.weight").requires_grad_(True)
    try:
        policy.checkpoint()
    except LoraError as error:
        return str(error)
    return "saved"


def test_a_trainable_parameter_beside_the_adapter_is_an_error_on_every_rank(model: Path, tmp_path: Path) -> None:
    layout = Layout(pp=2)
    for said in run_world(save_with_a_trainable_norm, layout, config_of(model, tmp_path / "run", layout)):
        assert "decoder.final_layernorm.weight: is trainable and no part of the adapter" in said
