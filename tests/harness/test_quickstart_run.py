"""The quickstart as a user starts it, and the evaluation it ends with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_quickstart import hardly_taught

from lora_harness.evaluate import evaluate, run_evaluation
from lora_harness.quickstart import previous, run_quickstart
from lora_harness.quickstart import run as quickstart_run
from lora_harness.quickstart.previous import earlier_run_aside, replaced_base
from lora_harness.report import refuse_used_output
from lora_plugins_sdk import read_adapter, write_adapter
from lora_plugins_sdk.errors import LoraError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"engine": "no_such"}, r"'no_such'.*local"),
        ({"model": "no_such"}, r"'no_such'.*qwen3"),
        ({"steps": 0}, "steps"),
        (
            {"overrides": ["seed=1", "task.kind=jsonl"]},
            r"--set seed: .* -> use --seed\n.*--set task.kind: .*lora-grpo train",
        ),
        ({"overrides": ["lora.rnk=1"]}, r"lora.rnk: unknown key"),
        ({"overrides": ["lora.target_modules=['embed_token']"]}, r"'embed_token': .* did you mean 'embed_tokens'"),
        ({"overrides": ["lora.expert_sharing=outer"]}, "expert_sharing 'outer': has no effect"),
        (
            {"model": "inkling", "overrides": ["lora.rank=32", "lora.target_modules=['all-linear', 'embed_tokens']"]},
            r"embed_tokens:\n  - rank=32: larger than .* -> use a rank of at most 16",
        ),
        ({"overrides": ["lora.rank=1000"]}, r"lora.rank = 1000: .*down_proj 128, .*k_proj \d+.* -> .* at most 128"),
        (
            {"model": "qwen36_moe", "overrides": ["lora.target_modules=['in_proj_b']"]},
            r"lora.rank = 16: .*in_proj_b 2 -> use a rank of at most 2",
        ),
        ({"overrides": ["lora.exclude_modules=['*']"]}, "nothing is left to train after exclusions"),
        (
            {"overrides": ["parallel.pp=3"], "world": 3},
            r"pipeline parallel size 3: does not divide the model's 2 layers",
        ),
        (
            {
                "model": "qwen36_moe",
                "engine": "sglang",
                "mode": "merge",
                "overrides": ["lora.rank=4", "lora.target_modules=['gate']"],
            },
            "routers are trained in adapter mode only",
        ),
        ({"engine": "sglang", "sglang_python": Path("absent")}, r"sglang\.python = 'absent': cannot be started"),
        ({"overrides": ["parallel.tp=2"]}, r"cannot share out 1 started process -> .*torchrun --nproc-per-node 2"),
    ],
)
def test_bad_arguments_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict, said: str
) -> None:
    """Neither a base, which takes minutes to make: it would be there."""
    monkeypatch.setenv("WORLD_SIZE", str(arguments.pop("world", 1)))
    with pytest.raises(LoraError, match=said):
        run_quickstart(output=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole quickstart of two steps, on a base that was hardly taught."""
    output = tmp_path_factory.mktemp("quickstart") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_run, "BaseRecipe", hardly_taught)
        run_quickstart(output=output, steps=2, overrides=("checkpoint.every=1",))
        assert (output / "checkpoints" / "step-000002").is_dir()
        (output / "notes.txt").write_text("mine")
        first = (output / "base" / "model.safetensors").stat().st_mtime_ns
        run_quickstart(output=output, steps=2)
        assert (output / "base" / "model.safetensors").stat().st_mtime_ns == first
    return output


@pytest.mark.slow
def test_everything_is_written_and_a_second_run_replaces_the_first(finished: Path) -> None:
    names = {one.name for one in finished.iterdir()}
    assert names >= {"base", "adapter", "config.toml", "metrics.jsonl", "reward.png", "summary.json", "notes.txt"}
    assert "checkpoints" not in names
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert (finished / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_summary_holds_what_evaluation_of_the_files_gives(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lora_harness.config import load_config

    config = load_config(finished / "config.toml")
    summary = json.loads((finished / "summary.json").read_text())
    before = run_evaluation(config, adapter=None)
    after = run_evaluation(config, adapter=finished / "adapter")
    assert (before.reward, after.reward) == (summary["reward_before"], summary["reward_after"])
    assert (before.prompts, before.samples, before.temperature) == (512, 4, 1.0)
    assert f"held-out reward {after.reward:.3f} on 512 prompts" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluation_uses_the_adapter_and_refuses_a_spoilt_one(finished: Path, tmp_path: Path) -> None:
    """B29, B36: PEFT only warns about tensors that it finds no place for, and the base would be evaluated."""
    from lora_harness.config import load_config

    config = load_config(finished / "config.toml", ["eval.count=128"])
    tensors = load_file(finished / "adapter" / "adapter_model.safetensors")
    torch.manual_seed(0)
    loud = {name: torch.randn_like(value) for name, value in tensors.items()}
    spoilt = dict(loud)
    name = next(one for one in spoilt if one.endswith("q_proj.lora_A.weight"))
    spoilt[name.replace("q_proj", "no_proj")] = spoilt.pop(name)
    for directory, content in ((tmp_path / "loud", loud), (tmp_path / "spoilt", spoilt)):
        directory.mkdir()
        (directory / "adapter_config.json").write_bytes((finished / "adapter" / "adapter_config.json").read_bytes())
        save_file(content, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    from lora_harness.evaluate import load_policy

    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        logits = [load_policy(config, adapter)(input_ids=ids).logits for adapter in (None, tmp_path / "loud")]
    assert float((logits[0] - logits[1]).abs().max()) > 0.1
    with pytest.raises(LoraError, match="no_proj"):
        evaluate(config, adapter=tmp_path / "spoilt", temperature=0.0, samples=1)
    write_adapter(read_adapter(finished / "adapter"), tmp_path / "shards", max_shard_bytes=1)
    with pytest.raises(LoraError, match=r"PEFT reads one -> write it into one first: lora-plugins export"):
        load_policy(config, tmp_path / "shards")


@pytest.mark.slow
@pytest.mark.world
def test_several_ranks_make_one_base_and_train_together(tmp_path: Path) -> None:
    """Under torchrun the first rank makes and evaluates, all train; options of the run are passed on."""
    output = tmp_path / "run"
    split = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=1", "parallel.sequence_parallel=true")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*start, str(Path(__file__).parent / "small_quickstart.py"), str(output), "inkling", *split, "lora.rank=12"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right sums on") == done.stdout.count("1/3 base: a small inkling") == 1
    config = tomllib.loads((output / "config.toml").read_text())
    assert config["parallel"]["ep"] == 2 and config["lora"]["rank"] == 12
    summary = json.loads((output / "summary.json").read_text())
    assert 0 < summary["logprob_gap_max"] <= 1e-4


def test_output_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(LoraError, match="already holds a run"), earlier_run_aside(tmp_path):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_foreign_files_of_a_runs_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    with pytest.raises(LoraError, match="adapter, which no quickstart wrote"), earlier_run_aside(tmp_path):
        pass
    assert (tmp_path / "adapter").is_dir()


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What a quickstart with checkpoints leaves, killed while it wrote, and what the user put beside it."""
    output = tmp_path / "out"
    with earlier_run_aside(output) as found:
        assert not found
    for name in ("metrics.jsonl", "summary.json", "notes.txt", "sglang/engine-0.log", "base/config.json"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("{}\n")
    for name in ("adapter", ".adapter.partial", "checkpoints/step-000001", "checkpoints/.step-000002.partial"):
        (output / name).mkdir(parents=True)
    (output / "checkpoints" / "step-000001" / "state.json").write_text("{}")
    return output


def content(directory: Path) -> dict[str, str]:
    files = (one for one in sorted(directory.rglob("*")) if one.is_file())
    return {str(one.relative_to(directory)): one.read_text() for one in files}


def test_only_run_files_are_replaced_and_the_next_run_is_not_refused(earlier: Path) -> None:
    with earlier_run_aside(earlier) as found:
        assert found
        refuse_used_output(earlier)
    assert sorted(one.name for one in earlier.iterdir()) == [".quickstart", "base", "notes.txt"]
    with earlier_run_aside(earlier) as found:
        assert not found


def test_a_run_that_is_refused_leaves_the_earlier_result(earlier: Path) -> None:
    """Logs of engines that did not start stay where the error says that they are."""
    before = content(earlier)
    with pytest.raises(LoraError, match="refused"), earlier_run_aside(earlier):
        (earlier / "sglang").mkdir()
        (earlier / "sglang" / "engine-0.log").write_text("why")
        raise LoraError("run", reason="refused", cure="none")
    assert content(earlier) == before | {"sglang/engine-0.log": "why"}
    with earlier_run_aside(earlier), pytest.raises(LoraError, match="another process"), earlier_run_aside(earlier):
        pass


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_is_refused_leaves_the_earlier_results_base(earlier: Path, killed: bool) -> None:
    """Also where it had made its own by then: the earlier adapter belongs to the base that it was trained on."""
    before, refused = content(earlier), LoraError("run", reason="refused", cure="none")
    with pytest.raises(LoraError, match="refused"), earlier_run_aside(earlier):
        (earlier / "base").rename(replaced_base(earlier))
        (earlier / "base").mkdir()
        (earlier / "base" / "config.json").write_text("of another seed")
        if killed:
            # What lies there then, while the lock is gone with the process.
            left = shutil.copytree(earlier, earlier.with_name("left"))
        raise refused
    if killed:
        with pytest.raises(LoraError, match="refused"), earlier_run_aside(left):
            raise refused
        assert content(left) == before
    assert content(earlier) == before


def test_a_base_without_a_result_gives_way_to_a_newer_one(tmp_path: Path) -> None:
    """Nothing belongs to it, and the newer one took minutes to make."""
    with pytest.raises(LoraError, match="refused"), earlier_run_aside(tmp_path):
        replaced_base(tmp_path).mkdir()
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "config.json").write_text("of another seed")
        raise LoraError("run", reason="refused", cure="none")
    assert content(tmp_path / "base") == {"config.json": "of another seed"}
    assert not replaced_base(tmp_path).exists()


def test_half_of_an_earlier_result_never_comes_back(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new run was accepted, and it ends while what it replaces is removed."""

    def half_removed(path: Path) -> None:
        if path.name == ".removed" and path.exists():
            (path / "base" / "config.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(previous, "remove", half_removed)
    with pytest.raises(KeyboardInterrupt), earlier_run_aside(earlier):
        (earlier / "base").rename(replaced_base(earlier))
        (earlier / "base").mkdir()
        (earlier / "base" / "config.json").write_text("of another seed")
    monkeypatch.undo()
    with earlier_run_aside(earlier) as found:
        assert not found
    assert content(earlier).keys() == {".quickstart", "base/config.json", "notes.txt"}
    assert (earlier / "base" / "config.json").read_text() == "of another seed"


def test_a_linked_base_comes_back(earlier: Path) -> None:
    """Its target is not where the link leads from the folder aside."""
    (earlier / "base").rename(earlier.with_name("shared"))
    (earlier / "base").symlink_to(Path("..", "shared"))
    before = content(earlier / "base")
    with pytest.raises(LoraError, match="refused"), earlier_run_aside(earlier):
        (earlier / "base").rename(replaced_base(earlier))
        (earlier / "base").mkdir()
        raise LoraError("run", reason="refused", cure="none")
    assert content(earlier / "base") == before


@pytest.mark.slow
def test_a_quickstart_that_is_refused_late_leaves_the_earlier_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when another seed's base is made: the earlier adapter is still beside the base that it was trained on."""
    monkeypatch.setattr(quickstart_run, "BaseRecipe", hardly_taught)
    run_quickstart(output=tmp_path / "run", steps=1)
    before = {one: one.read_bytes() for one in (tmp_path / "run").rglob("*") if one.is_file()}

    def refuse(*_: object, **__: object) -> None:
        assert (tmp_path / "run" / "base" / "model.safetensors").read_bytes() not in before.values()
        raise LoraError("run", reason="refused", cure="none")

    monkeypatch.setattr("lora_harness.train.Trainer", refuse)
    with pytest.raises(LoraError, match="refused"):
        run_quickstart(output=tmp_path / "run", steps=1, seed=1)
    assert {one: one.read_bytes() for one in (tmp_path / "run").rglob("*") if one.is_file()} == before


def test_a_killed_start_leaves_the_earlier_result_to_the_next(earlier: Path) -> None:
    before = content(earlier)
    (earlier / ".replaced").mkdir()
    for name in ("adapter", "checkpoints", "metrics.jsonl"):
        (earlier / name).rename(earlier / ".replaced" / name)
    with pytest.raises(LoraError, match="refused"), earlier_run_aside(earlier):
        raise LoraError("run", reason="refused", cure="none")
    assert content(earlier) == before


def test_a_base_of_somebody_else_is_refused_before_the_earlier_result_is_gone(earlier: Path) -> None:
    with pytest.raises(LoraError, match="no quickstart base"):
        run_quickstart(output=earlier, steps=1)
    assert (earlier / "checkpoints" / "step-000001" / "state.json").is_file()
