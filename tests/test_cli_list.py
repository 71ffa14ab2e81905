"""`lora-plugins list` and the way errors leave the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins_sdk import HOOKSPEC_API


def test_list_shows_working_and_broken_plugins(lora_plugins, install: Callable[..., Path]) -> None:
    install("bad", "import no_such_module_at_all", distribution="bad-lora", version="9.9")
    result = lora_plugins("list")
    assert result.code == 0
    assert re.search(r"^qwen3 +ok +qwen3 +qwen3 +lora-plugins-sdk ", result.out, re.MULTILINE)
    assert re.search(r"^bad +broken +- +- +bad-lora 9\.9 +bad_lora_bad *$", result.out, re.MULTILINE)
    assert "bad: broken: ModuleNotFoundError: No module named 'no_such_module_at_all'" in result.out


def test_list_as_json_is_the_whole_row(lora_plugins, install: Callable[..., Path], toy_plugin: str) -> None:
    file = install("toy", f"{toy_plugin}\nrequires_api = {HOOKSPEC_API}\n", distribution="toy-lora", version="3.1")
    rows = {row["name"]: row for row in json.loads(lora_plugins("list", "--json").out)}
    assert rows["toy"] == {
        "name": "toy",
        "status": "ok",
        "error": None,
        "distribution": "toy-lora",
        "version": "3.1",
        "source": "toy_lora_toy",
        "file": str(file),
        "requires_api": list(HOOKSPEC_API),
        "observer": False,
        "architectures": [{"name": "toy", "model_types": ["toy_model"]}],
    }
    assert rows["qwen3"]["status"] == "ok"


def test_list_takes_plugin_files(lora_plugins, tmp_path: Path, toy_plugin: str) -> None:
    (tmp_path / "mine.py").write_text(toy_plugin)
    result = lora_plugins("list", "--plugin", str(tmp_path / "mine.py"))
    assert re.search(r"^mine +ok +toy +toy_model +\(file\)", result.out, re.MULTILINE)


def test_list_without_plugins_says_so(lora_plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_plugins_sdk.discovery.entry_points", lambda group: [])
    assert lora_plugins("list").out == "no plugins are installed\n"


def test_a_user_error_is_one_message_without_a_traceback(lora_plugins) -> None:
    result = lora_plugins("list", "--plugin", "nope.py")
    assert (result.code, result.out) == (2, "")
    assert result.err == "lora-plugins: plugin file nope.py: there is no such file -> give the path of a Python file\n"


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-c", "from lora_plugins_sdk.cli import main; main()", "--debug"]
    result = subprocess.run([*command, "list", "--plugin", "nope.py"], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "Traceback (most recent call last)" in result.stderr
    assert "LoraError: plugin file nope.py" in result.stderr


@pytest.mark.parametrize("arguments", [["lst"], ["list", "--colour"], ["describe", "qwen3"]])
def test_a_wrong_command_line_exits_with_2(lora_plugins, arguments: list[str]) -> None:
    result = lora_plugins(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err
