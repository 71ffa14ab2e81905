"""Where a run may start: foreign checkpoints are refused with everything that differs, before a model is built."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_run import config_of, raw_config, write_model
from small_checkpoint import small_state, small_tensors
from tiny_model import write_tiny_qwen3

from lora_harness.checkpoint import CheckpointDirectory, identify, write_checkpoint
from lora_harness.config import TrainConfig, parse_config
from lora_harness.start import AUTO, PromptDigest, Start, choose_start
from lora_harness.tasks import build_task
from lora_plugins_sdk import RunFacts, base_fingerprint, write_adapter
from lora_plugins_sdk.adapter_meta import AdapterOrigin
from lora_plugins_sdk.errors import LoraError

STEP = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def output(model: Path, tmp_path: Path) -> Path:
    """A run with a checkpoint after step 3."""
    output = tmp_path / "run"
    config = config_of(model, output)
    checkpoints = CheckpointDirectory(output)
    checkpoints.prepare()
    done = _prompts(config)[: STEP * config.algorithm.prompts_per_step]
    state = small_state(STEP).model_copy(
        update={"identity": identify(config, RunFacts()), "prompts": PromptDigest(done).hexdigest()}
    )
    write_checkpoint(checkpoints.place(STEP), small_tensors(STEP), state)
    (output / "metrics.jsonl").write_text("")
    return output


def _prompts(config: TrainConfig) -> Any:
    return build_task(config.task).prompts("train", config.steps * config.algorithm.prompts_per_step, config.seed)


def start(config: TrainConfig, resume: str | None = AUTO, *, weights_only: bool = False, tp: int = 1) -> Start:
    facts = RunFacts(tp=tp)
    return choose_start(config, facts, _prompts(config), resume=resume, weights_only=weights_only)


def changed(model: Path, output: Path, changes: dict[str, Any]) -> TrainConfig:
    """The run's config with dotted keys changed."""
    raw = raw_config(model, output)
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        (raw.setdefault(table, {}) if table else raw)[name] = value
    return parse_config(raw)


def refused(config: TrainConfig, resume: str | None = AUTO, **options: Any) -> dict[str, str]:
    with pytest.raises(LoraError) as caught:
        start(config, resume, **options)
    return {one.subject: f"{one.reason} -> {one.cure}" for one in caught.value.diagnostics}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.micro_batch_size": 1},
        {"parallel.pp": 2, "rollout.max_batch_size": 2, "checkpoint.keep": 1, "eval.every": 0},
        {"model.plugin": "qwen3"},
    ],
)
def test_what_does_not_change_the_numbers_may_differ(model, output, changes):
    config = changed(model, output, changes)
    found = start(config, tp=config.parallel.tp)
    assert found.checkpoint == output / "checkpoints" / "step-000003" and found.resume_at == STEP
    assert found.resumed is not None and found.note == f"resuming after step 3 from {found.checkpoint}"


def test_everything_that_differs_is_listed_with_its_cure(model, output):
    config = changed(
        model, output, {"seed": 4, "lora.alpha": 16.0, "optimizer.lr": 0.1, "algorithm.group_size": 5, "steps": 8}
    )
    found = refused(config)
    assert set(found) == {"seed", "lora", "lora.alpha", "optimizer.lr", "algorithm.group_size", "steps = 8"}
    assert found["seed"].startswith("is 4, in the checkpoint's run it was 3 -> set it back, or start a new run")
    assert "learning rates of the steps already done were those of a run of 6 steps" in found["steps = 8"]


def test_another_base_model_is_refused_and_a_copy_is_not(model, output, tmp_path):
    """Same config and shapes, other weights; then the same weights elsewhere."""
    other = write_model(tmp_path / "other")
    assert start(changed(other, output, {})).resumed is not None
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = refused(changed(other, output, {}))
    ((subject, said),) = found.items()
    assert subject.startswith("model.path") and "holds another base model" in said and str(model) in said
    assert (
        refused(changed(other, tmp_path / "new", {}), str(output / "checkpoints/step-000003"), weights_only=True)
        == found
    )


def test_another_plugin_or_plugin_version_is_told(model, output):
    """A newer plugin whose table is the same may go on; one that changes the factors may not."""
    file = output / "checkpoints" / "step-000003" / "state.json"
    state = json.loads(file.read_text())

    def edit(**identity: str) -> None:
        file.write_text(json.dumps(state | {"identity": state["identity"] | identity}))

    edit(plugin_version="0.0.1")
    assert start(config_of(model, output)).resumed is not None
    edit(plugin_version="0.0.1", table="5" * 64)
    assert (
        "against 0.0.1 -> use the checkpoint's lora table and plugin version"
        in refused(config_of(model, output))["lora"]
    )
    edit(plugin="mine")
    assert refused(config_of(model, output)) == {
        "plugin 'qwen3'": "the checkpoint was made with plugin 'mine' -> set model.plugin to that one"
    }


def test_a_longer_run_may_go_on_where_the_rate_does_not_depend_on_its_length(model, output):
    file = output / "checkpoints" / "step-000003" / "state.json"
    config = changed(model, output, {"optimizer.schedule": "constant", "steps": 60})
    found = refused(config)
    assert found["optimizer.min_lr"].startswith("is not set, in the checkpoint's run it was 0.0")
    state = json.loads(file.read_text())
    state["identity"]["config"]["optimizer"] = config.model_dump(mode="json", exclude_none=True)["optimizer"]
    file.write_text(json.dumps(state))
    assert start(config).resume_at == STEP
    shorter = changed(
        model, output, {"optimizer.schedule": "constant", "steps": 2, "checkpoint.every": 1, "eval.every": 1}
    )
    assert refused(shorter) == {"steps = 2": "step 3 is finished -> set it higher"}


def test_changed_training_data_are_noticed(model, output, monkeypatch):
    """B17: the place in the data is only a place in the same data."""
    import toy_rewards

    original = toy_rewards.prompts
    monkeypatch.setattr(toy_rewards, "prompts", lambda split, count, seed: original(split, count, seed + 1))
    assert "other prompts for the 3 finished steps" in refused(config_of(model, output))["task"]


def test_a_checkpoint_is_continued_in_its_own_directory(model, output, tmp_path):
    path = output / "checkpoints" / "step-000003"
    ((subject, said),) = refused(config_of(model, tmp_path / "new"), str(path)).items()
    assert subject.startswith("output = ") and "add --load-weights-only" in said
    renamed = path.rename(path.with_name("step-000005"))
    assert any(one.startswith("output = ") for one in refused(config_of(model, output), str(renamed)))


def test_weights_alone_need_a_path_a_new_output_and_nothing_but_the_same_factors(model, output, tmp_path):
    path = str(output / "checkpoints" / "step-000003")
    new = changed(model, tmp_path / "new", {"seed": 9, "optimizer.lr": 0.1, "algorithm.group_size": 7, "steps": 50})
    found = start(new, path, weights_only=True)
    assert (found.resumed, found.resume_at, found.weights_only) == (None, None, True)
    assert found.note is not None and found.note.endswith("its optimizer is not loaded")
    for resume in (None, AUTO):
        assert "name it: --resume PATH" in refused(new, resume, weights_only=True)["--load-weights-only"]
    assert "already holds a run" in next(iter(refused(config_of(model, output), path, weights_only=True).values()))
    assert set(refused(changed(model, tmp_path / "new", {"lora.rank": 8}), path, weights_only=True)) == {"lora"}
    write_adapter(small_tensors(3).adapter, tmp_path / "warm")
    both = changed(model, tmp_path / "new", {"warm_start.adapter": str(tmp_path / "warm")})
    assert "has no effect with --load-weights-only" in refused(both, path, weights_only=True)["warm_start.adapter"]


def test_auto_without_a_checkpoint_starts_anew_but_not_over_a_finished_run(model, tmp_path):
    config = config_of(model, tmp_path)
    found = start(config)
    assert (found.resume_at, found.checkpoint) == (0, None) and found.note is not None and "starting anew" in found.note
    (tmp_path / "metrics.jsonl").write_text("")
    assert (start(config).resume_at, start(config, None).resume_at) == (0, None)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "already holds a run" in next(iter(refused(config, None).values()))
    (tmp_path / "summary.json").write_text("{}")
    assert "finished run without checkpoints" in next(iter(refused(config).values()))


def test_the_directory_of_a_run_means_its_newest_checkpoint(model, output, tmp_path):
    assert start(config_of(model, output), str(output)) == start(config_of(model, output), AUTO)
    new = config_of(model, tmp_path / "new")
    found = start(new, str(output), weights_only=True)
    assert found.weights_only and found.checkpoint == output / "checkpoints" / "step-000003"
    (tmp_path / "empty").mkdir()
    ((subject, said),) = refused(new, str(tmp_path / "empty")).items()
    assert subject == f"--resume {tmp_path / 'empty'}" and "give RUN/checkpoints/step-N" in said


def test_a_path_without_a_checkpoint(model, tmp_path):
    ((subject, said),) = refused(config_of(model, tmp_path / "run"), str(tmp_path / "absent")).items()
    assert subject == f"--resume {tmp_path / 'absent'}" and said.startswith("no such directory -> give RUN/")


def test_a_warm_start_is_of_the_same_base_and_the_same_file_when_resumed(model, tmp_path):
    other = write_tiny_qwen3(tmp_path / "other", layers=1)
    adapter = small_tensors(3).adapter
    for base, fits in ((other, False), (model, True), ("moved/away", True)):
        saved = type(adapter)(tensors=adapter.tensors, config={**adapter.config, "base_model_name_or_path": str(base)})
        write_adapter(saved, tmp_path / "warm", replace=True)
        config = changed(model, tmp_path / "run", {"warm_start.adapter": str(tmp_path / "warm")})
        if fits:
            assert start(config, None).identity is not None
        else:
            assert "was trained on the base in" in next(iter(refused(config, None).values()))
    before = identify(config, RunFacts())
    saved = type(adapter)(tensors={"x": torch.ones(1)}, config=adapter.config)
    write_adapter(saved, tmp_path / "warm", replace=True)
    assert identify(config, RunFacts()).warm_start != before.warm_start


def test_the_fingerprint_in_the_meta_file_tells_the_base(model, tmp_path):
    """Also where the base's own directory is gone; after a change on purpose the file can be removed."""
    other = write_tiny_qwen3(tmp_path / "other", layers=1)
    adapter = replace(small_tensors(3).adapter, origin=AdapterOrigin(base_fingerprint=base_fingerprint(other)))
    shutil.rmtree(other)
    write_adapter(adapter, tmp_path / "warm")
    config = changed(model, tmp_path / "run", {"warm_start.adapter": str(tmp_path / "warm")})
    (said,) = refused(config, None).values()
    assert "was trained on the base in" in said and "remove adapter_meta.json" in said
    (tmp_path / "warm" / "adapter_meta.json").unlink()
    assert start(config, None).identity is not None
    own = replace(adapter, origin=AdapterOrigin(base_fingerprint=base_fingerprint(model)))
    write_adapter(own, tmp_path / "warm", replace=True)
    assert start(config, None).identity is not None
