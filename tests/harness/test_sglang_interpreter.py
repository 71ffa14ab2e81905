"""An interpreter without SGLang is told before a base is made or loaded for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_qwen3

from lora_harness.config import parse_config
from lora_harness.config.rollout import SglangSection
from lora_harness.engines.sglang.interpreter import refuse_without_sglang
from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer
from lora_harness.train import run_training
from lora_plugins_sdk.errors import LoraError


def script(folder: Path, commands: str) -> Path:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{commands}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (f'exec {sys.executable} -S -E "$@"', r"python = '.*/python': .*/python has no SGLang -> install SGLang"),
        ("echo first >&2; echo last words >&2; exit 3", r"is no Python interpreter that works \(last words\)"),
        ("exit 1", r"is no Python interpreter that works \(nothing was printed\)"),
    ],
)
def test_an_interpreter_that_cannot_serve(tmp_path: Path, commands: str, said: str) -> None:
    with pytest.raises(LoraError, match=said):
        refuse_without_sglang(SglangSection(python=script(tmp_path, commands)))


def test_a_path_without_an_interpreter(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match=r"python = '.*/absent': cannot be started \(No such file"):
        refuse_without_sglang(SglangSection(python=tmp_path / "absent"))
    (tmp_path / "file").write_text("no program")
    with pytest.raises(LoraError, match=r"cannot be started \(Permission denied\)"):
        refuse_without_sglang(SglangSection(python=tmp_path / "file"))


def test_one_in_process_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoraError, match=r"rollout\.sglang\.in_process: .*has no SGLang -> remove it and set"):
        refuse_without_sglang(SglangSection(in_process=True))


def test_engines_that_run_already_need_none() -> None:
    refuse_without_sglang(None)
    refuse_without_sglang(SglangSection(urls=("http://localhost:1",)))


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_one_that_has_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe_path: str) -> None:
    """A module of that name is all that is looked for: SGLang itself takes seconds to import."""
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    (tmp_path / "sglang.py").write_text("raise RuntimeError('was imported')\n")
    refuse_without_sglang(SglangSection(python=script(tmp_path, f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')))


def test_a_folder_of_that_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's output has one, and so has the place where somebody keeps SGLang's sources."""
    python = script(tmp_path, f'exec {sys.executable} -S -E "$@"')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sglang").mkdir()
    for content in ((), ("__init__.py",)):
        for name in content:
            (tmp_path / "sglang" / name).touch()
        with pytest.raises(LoraError, match="has no SGLang"):
            refuse_without_sglang(SglangSection(python=python))


def test_training_asks_before_it_builds_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_qwen3(tmp_path / "model", vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(model)
    built: list[object] = []
    monkeypatch.setattr("lora_harness.train.MegatronPolicy", lambda *of: built.append(of))
    config = {
        "steps": 1,
        "output": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "task": {"kind": "function", "prompts": "toy_rewards:prompts", "reward": "toy_rewards:reward"},
        "rollout": {"engine": "sglang", "max_new_tokens": 4, "sglang": {"python": str(tmp_path / "absent")}},
        "eval": {"count": 2},
    }
    with pytest.raises(LoraError, match="cannot be started"):
        run_training(parse_config(config))
    assert not built
    assert not (tmp_path / "run").exists()
