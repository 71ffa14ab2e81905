"""Arguments of another type: one clear error that tells how to get the right one."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sdk_toy import HF_CONFIG
from sdk_toy_host import assert_same, snapshot, toy_model, toy_plugin

from lora_plugins_sdk import LoraConfig, LoraError, RunFacts, attach, import_adapter


class TransformersConfig:
    """What transformers gives instead of a mapping."""

    def to_dict(self) -> dict[str, Any]:
        return dict(HF_CONFIG)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("plugin", "qwen3", r"'plugin': is of type str, expected SelectedPlugin.*load_plugin"),
        ("lora", {"rank": 2}, r"'lora': is of type dict, expected LoraConfig.*LoraConfig\(rank"),
        ("run", RunFacts(), r"'run': is of type RunFacts, expected ParallelRun.*from_megatron"),
        ("model", None, r"'model': is of type NoneType, expected Module"),
        ("model", [None], r"'model': is of type NoneType, expected Module"),
        ("model", [], r"'model': is of type list, expected Module"),
        ("hf_config", TransformersConfig(), r"'hf_config': is of type TransformersConfig.*config.to_dict\(\)"),
        ("hf_config", None, r"'hf_config': is of type NoneType.*give config.json"),
    ],
)
def test_an_argument_of_another_type_is_refused(name: str, value: Any, message: str) -> None:
    model = toy_model()
    before = snapshot(model)
    arguments: dict[str, Any] = {
        "model": model,
        "plugin": toy_plugin(),
        "hf_config": HF_CONFIG,
        "lora": LoraConfig(rank=2),
        "run": None,
    }
    with pytest.raises(LoraError, match=message):
        attach(**{**arguments, name: value})
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("saved", ["adapter", Path("adapter")])
def test_a_directory_is_read_before_it_is_imported(saved: Any) -> None:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
    with pytest.raises(LoraError, match=r"'saved': .* expected PeftAdapter.*read_adapter\(directory\)"):
        import_adapter(model, saved)


def test_groups_that_do_not_exist_yet_are_not_read() -> None:
    """In a process of its own: other tests start megatron-core's groups in this one."""
    code = "from lora_plugins_sdk import ParallelRun; ParallelRun.from_megatron()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert re.search(r"LoraError: .*is not initialised.*initialize_megatron.*initialize_model_parallel", done.stderr)
