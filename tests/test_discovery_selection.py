"""Selecting one plugin for a run, and what is said when that is not possible."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_plugins_sdk import LoraConfig, LoraError, RunFacts, derive_table, load_plugin

Install = Callable[..., Path]

TOY_CONFIG = {"model_type": "toy_model", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16}
OBSERVER = """
from lora_plugins_sdk import hookimpl
lora_observer = True
seen = []

@hookimpl
def lora_hf_name(row):
    seen.append(row.hf_module)
"""
OTHER_MODEL = """
@hookimpl(tryfirst=True)
def lora_hf_name(row):
    return "stolen"
"""


def test_a_plugin_is_selected_by_model_type_or_by_architecture(install: Install, toy_plugin: str) -> None:
    install("my-toy", toy_plugin, version="0.7")
    by_type, by_name = load_plugin("toy_model"), load_plugin(architecture="toy")
    assert by_type.architecture == by_name.architecture
    assert (by_type.name, by_type.version) == ("my-toy", "0.7")


def test_an_unknown_model_type_lists_what_is_served_and_what_is_broken(install: Install, toy_plugin: str) -> None:
    install("toy", toy_plugin)
    install("bad", "import no_such_module_at_all")
    with pytest.raises(LoraError, match="model type 'bert': no plugin serves it") as caught:
        load_plugin("bert")
    for text in ("model type 'qwen3'", "model type 'toy_model'", "bad is broken"):
        assert text in str(caught.value)


def test_a_broken_selected_plugin_names_distribution_version_file_cause_and_cure(install: Install) -> None:
    file = install("toy", "import no_such_module_at_all", distribution="toy-lora", version="3.1")
    with pytest.raises(LoraError) as caught:
        load_plugin("toy_model", plugin="toy")
    for text in (
        "toy-lora",
        "3.1",
        str(file),
        "No module named 'no_such_module_at_all'",
        "update or reinstall toy-lora",
    ):
        assert text in str(caught.value)


def test_a_broken_file_is_not_sent_to_doctor_which_does_not_see_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1 / 0\n")
    with pytest.raises(LoraError, match="is broken: ZeroDivisionError") as error:
        load_plugin("toy_model", plugin=str(file))
    assert f"`python {file}`" in str(error.value) and "doctor" not in str(error.value)


def test_a_broken_plugin_with_the_architecture_s_name_is_reported_as_broken(install: Install) -> None:
    install("toy", "1 / 0")
    with pytest.raises(LoraError, match="is broken: ZeroDivisionError"):
        load_plugin(architecture="toy")


def test_a_disabled_selected_plugin_names_the_variable(install: Install, toy_plugin: str) -> None:
    install("toy", toy_plugin)
    with pytest.raises(LoraError, match="is disabled: in LORA_PLUGINS_DISABLE"):
        load_plugin("toy_model", plugin="toy", environ={"LORA_PLUGINS_DISABLE": "toy"})


def test_two_plugins_for_one_model_type_are_an_error_that_plugin_resolves(install: Install, toy_plugin: str) -> None:
    first, second = install("one", toy_plugin), install("two", toy_plugin)
    with pytest.raises(LoraError, match="model type 'toy_model': claimed by") as caught:
        load_plugin("toy_model")
    option = "model.plugin = 'one-dist:one'"
    for text in (str(first), str(second), "--plugin one-dist:one", "--plugin two-dist:two", option):
        assert text in str(caught.value)
    assert load_plugin("toy_model", plugin="two").name == "two"


def test_two_plugins_of_one_name_are_told_apart_by_distribution(install: Install, toy_plugin: str) -> None:
    install("toy", toy_plugin, distribution="left", version="1.0")
    install("toy", toy_plugin, distribution="right", version="2.0")
    with pytest.raises(
        LoraError,
        match=re.escape("use --plugin left:toy or --plugin right:toy; in a training config, model.plugin = 'left:toy'"),
    ):
        load_plugin("toy_model", plugin="toy")
    assert load_plugin("toy_model", plugin="right:toy").version == "2.0"


def test_a_plugin_that_does_not_serve_the_model_is_refused(install: Install, toy_plugin: str) -> None:
    install("toy", toy_plugin)
    with pytest.raises(LoraError, match="does not serve model type 'qwen3'; it serves model types toy_model"):
        load_plugin("qwen3", plugin="toy")


def test_an_unknown_plugin_name_lists_the_installed_ones() -> None:
    with pytest.raises(LoraError, match=r"plugin 'nope': is not installed; installed: .*qwen3"):
        load_plugin("qwen3", plugin="nope")


def test_a_plugin_file_wins_over_an_installed_plugin_for_the_same_model(
    install: Install, toy_plugin: str, tmp_path: Path
) -> None:
    install("toy", toy_plugin)
    file = tmp_path / "mine.py"
    file.write_text(toy_plugin)
    selected = load_plugin("toy_model", plugin=str(file))
    assert (selected.name, selected.version) == ("mine", "")


def test_only_the_selected_plugin_and_observers_are_asked(install: Install, toy_plugin: str) -> None:
    """Another model's override must not win, even with `tryfirst`."""
    install("toy", toy_plugin)
    install("thief", toy_plugin.replace("toy", "other") + OTHER_MODEL)
    install("watcher", OBSERVER)
    selected = load_plugin("toy_model")
    table = derive_table(selected, TOY_CONFIG, LoraConfig(rank=2), RunFacts())
    assert [row.hf_name for row in table.rows][:2] == [
        "base_model.model.model.layers.0.down_proj.lora_A.weight",
        "base_model.model.model.layers.0.down_proj.lora_B.weight",
    ]
    watcher: Any = selected.manager.get_plugin("watcher-dist:watcher")
    assert len(watcher.seen) == len(table.rows)


def test_trace_shows_every_call_with_arguments_and_result(
    install: Install, toy_plugin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_PLUGINS_TRACE", "1")
    install("toy", toy_plugin)
    derive_table(load_plugin("toy_model"), TOY_CONFIG, LoraConfig(rank=2), RunFacts())
    lines = capsys.readouterr().err.splitlines()
    assert any("lora_register_architectures() asks toy" in line for line in lines)
    assert any("lora_normalize_targets(architecture=Architecture(name='toy'" in line for line in lines)
    assert any("lora_hf_name -> 'base_model.model.model.layers.1.down_proj.lora_B.weight'" in line for line in lines)


def test_trace_says_what_a_hook_raised(
    tmp_path: Path, toy_plugin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_PLUGINS_TRACE", "1")
    file = tmp_path / "mine.py"
    file.write_text(toy_plugin + "@hookimpl\ndef lora_hf_name(row):\n    raise KeyError('gone')\n")
    with pytest.raises(KeyError):
        derive_table(load_plugin("toy_model", plugin=str(file)), TOY_CONFIG, LoraConfig(rank=2), RunFacts())
    assert "lora_hf_name raised KeyError: 'gone'" in capsys.readouterr().err


def test_a_trace_value_without_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_PLUGINS_TRACE", "yes")
    with pytest.raises(LoraError, match="LORA_PLUGINS_TRACE=yes: is neither 0 nor 1"):
        load_plugin("qwen3")
