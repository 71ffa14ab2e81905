"""The command line: help, overrides on their way to the trainer, errors as one message, no torch before work begins."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lora_harness import cli
from lora_harness.config import TrainConfig
from lora_harness.config.catalogue import options
from lora_harness.quickstart.recipe import OWN_KEYS
from lora_harness.report.metrics_file import MetricsWriter

CONFIG = '[model]\npath = "base"\n[task]\nkind = "reasoning_gym"\ndataset = "chain_sum"\n'
COMMANDS = ("train", "eval", "plot", "quickstart", "options")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text("steps = 5\n" + CONFIG)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that commands make into the modules that do the work, which are replaced."""
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for module, function in (
        ("train", "run_training"),
        ("evaluate", "run_evaluation"),
        ("quickstart", "run_quickstart"),
    ):
        stand_in = types.ModuleType(f"lora_harness.{module}")
        record = lambda *args, _name=function, **kwargs: seen.append((_name, args, kwargs))  # noqa: E731
        setattr(stand_in, function, record)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return seen


def command(
    *arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Exit code, output and errors of one call."""
    monkeypatch.setattr(sys, "argv", ["lora-grpo", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
        raise SystemExit(0)
    shown = capsys.readouterr()
    code = left.value.code
    return (code if isinstance(code, int) else 0), shown.out, shown.err


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *arguments: command(*arguments, capsys=capsys, monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(call, name):
    code, out, _ = call(name, "--help")
    assert code == 0 and "Usage" in out and len(out.splitlines()) > 5


def test_train_hands_over_the_config_with_its_overrides(call, config, calls):
    assert call("train", str(config), "--set", "steps=9", "--set", "output=runs/x")[0] == 0
    ((name, (loaded,), keywords),) = calls
    assert name == "run_training" and isinstance(loaded, TrainConfig)
    assert keywords == {"resume": None, "load_weights_only": False}
    assert loaded.steps == 9 and loaded.output == Path("runs/x")


def test_the_first_rank_says_at_once_that_it_loads(call, config, calls, monkeypatch):
    for rank, said in ((None, True), ("0", True), ("1", False)):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        code, out, _ = call("train", str(config))
        assert code == 0 and (out == "loading the data and the model base ...\n") is said and bool(out) is said
    assert len(calls) == 3


def test_train_hands_over_where_to_start(call, config, calls, tmp_path):
    (tmp_path / "runs" / "grpo").mkdir(parents=True)
    MetricsWriter(tmp_path / "runs" / "grpo").__exit__(None, None, None)
    assert call("train", str(config), "--resume", "auto")[0] == 0
    assert call("train", str(config), "--resume", "a/b", "--load-weights-only")[0] == 0
    assert [keywords for _, _, keywords in calls] == [
        {"resume": "auto", "load_weights_only": False},
        {"resume": "a/b", "load_weights_only": True},
    ]


def test_a_bad_config_is_one_message_and_exit_code_2(call, config, calls):
    code, out, err = call("train", str(config), "--set", "lora.rnk=3", "--set", "eval.samples=2")
    assert code == 2 and not out and not calls
    assert err.startswith("lora-grpo: ") and "Traceback" not in err
    assert "lora.rnk: unknown key -> did you mean 'rank'?" in err and "eval.samples: has no effect" in err


def test_the_rank_that_fails_is_named(call, config, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert "lora-grpo (rank 3): " in call("train", "absent.toml")[2]


def test_debug_shows_the_traceback(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lora-grpo", "--debug", "train", "absent.toml"])
    with pytest.raises(ValueError, match="No such file"):
        cli.main()


def test_train_refuses_a_used_output_before_anything_is_loaded(call, config, calls, tmp_path):
    (tmp_path / "runs" / "grpo").mkdir(parents=True)
    with MetricsWriter(tmp_path / "runs" / "grpo") as metrics:
        metrics.write({"step": 0})
    code, _, err = call("train", str(config))
    assert code == 2 and "already holds a run" in err and not calls


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
def test_weights_alone_of_no_named_checkpoint_are_refused_before_the_used_output(call, config, calls, tmp_path, resume):
    (tmp_path / "runs" / "grpo").mkdir(parents=True)
    with MetricsWriter(tmp_path / "runs" / "grpo") as metrics:
        metrics.write({"step": 0})
    code, out, err = call("train", str(config), "--load-weights-only", *resume)
    assert code == 2 and not out and not calls
    assert "--load-weights-only: begins a new run from a checkpoint -> name it: --resume PATH" in err


def test_eval_hands_over_the_adapter_or_none(call, config, calls, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert call("eval", str(config), "--adapter", str(tmp_path / "adapter"))[0] == 0
    assert call("eval", str(config))[0] == 0
    assert [keywords["adapter"] for _, _, keywords in calls] == [tmp_path / "adapter", None]


def test_eval_refuses_what_is_no_adapter(call, config, calls, tmp_path):
    code, _, err = call("eval", str(config), "--adapter", str(tmp_path))
    assert code == 2 and "has no adapter_config.json" in err and not calls
    code, _, err = call("eval", str(config), "--adapter", str(tmp_path / "nowhere"))
    assert code == 2 and "nowhere: no such directory" in err and not calls


def test_quickstart_hands_over_its_options(call, calls):
    run = ("--output", "q", "--model", "m", "--seed", "3", "--steps", "2")
    run = (*run, "--set", "parallel.tp=2", "--set", "lora.rank=8")
    assert call("quickstart", *run, "--engine", "sglang", "--mode", "adapter", "--sglang-python", "p")[0] == 0
    expected = {"output": Path("q"), "model": "m", "seed": 3, "steps": 2}
    expected["overrides"] = ["parallel.tp=2", "lora.rank=8"]
    expected |= {"engine": "sglang", "mode": "adapter", "sglang_python": Path("p")}
    assert calls == [("run_quickstart", (), expected)]


def test_quickstart_help_names_the_keys_that_set_does_not_take():
    """Not from the help as it is shown, which is wrapped."""
    from typer.main import get_command

    command = get_command(cli.app).commands["quickstart"]  # type: ignore[attr-defined]
    (told,) = (one.help for one in command.params if one.name == "overrides")
    assert [key for key in OWN_KEYS if f"`{key}`" not in told] == []


def test_plot_writes_beside_the_metrics(call, tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 0, "reward": 0.5, "tokens": 3, "seconds_rollout": 1.0})
    code, out, _ = call("plot", str(tmp_path))
    assert code == 0 and "0.5" in out and (tmp_path / "reward.png").is_file()
    assert call("plot", str(tmp_path / "metrics.jsonl"), "-o", str(tmp_path / "b.png"))[0] == 0
    assert (tmp_path / "b.png").is_file()


def test_plot_of_nothing(call, tmp_path):
    code, _, err = call("plot", str(tmp_path))
    assert code == 2 and "metrics.jsonl: cannot be read" in err


def test_options_lists_every_key_with_its_default(call):
    listed = {key: default for key, default, _ in options()}
    assert listed["steps"] == "required" and listed["optimizer.lr"] == "0.0001" and listed["algorithm.clip_low"] == ""
    assert listed["lora.target_modules"] == '["all-linear"]' and listed["task.train_path"] == "required"
    assert all(meaning for _, _, meaning in options())
    out = call("options")[1]
    assert all(key in out for key in listed)


def test_help_and_options_need_no_torch():
    code = (
        "import sys\nfrom lora_harness import cli\nsys.argv = ['lora-grpo', 'options']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
