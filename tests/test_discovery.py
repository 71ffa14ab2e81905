"""Discovery: every plugin is a row, whatever state it is in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins_sdk.discovered import DiscoveredPlugin, PluginStatus
from lora_plugins_sdk.discovery import discover
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hookspecs import HOOKSPEC_API

Install = Callable[..., Path]


def row_of(name: str, **arguments: object) -> DiscoveredPlugin:
    (row,) = (one for one in discover(**arguments) if one.name == name)  # type: ignore[arg-type]
    return row


def test_the_in_tree_plugin_comes_through_the_same_entry_point_group() -> None:
    row = row_of("qwen3")
    assert (row.status, row.error) == (PluginStatus.OK, None)
    assert row.distribution == "lora-plugins-sdk"
    assert "qwen3" in row.model_types


def test_an_installed_plugin_is_a_row_with_its_whereabouts(install: Install, toy_plugin: str) -> None:
    file = install("toy", toy_plugin, distribution="toy-lora", version="3.1")
    row = row_of("toy")
    assert (row.status, row.distribution, row.version) == (PluginStatus.OK, "toy-lora", "3.1")
    assert (row.source, row.file) == ("toy_lora_toy", str(file))
    assert [one.name for one in row.architectures] == ["toy"]
    assert row.model_types == ("toy_model",)


def test_an_entry_point_may_name_an_object(install: Install, toy_plugin: str) -> None:
    lines = toy_plugin.replace("@hookimpl\ndef lora_register_architectures():", "def toy():")
    source = lines + (
        "class Plugin:\n    @hookimpl\n    def lora_register_architectures(self):\n        return toy()\n\n"
        "plugin = Plugin()\n"
    )
    install("toy", source, value="toy_dist_toy:plugin")
    assert row_of("toy").model_types == ("toy_model",)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_plugin_that_fails_to_import_is_a_row_and_the_others_load(
    install: Install, toy_plugin: str, source: str, cause: str
) -> None:
    install("aaa", source)
    install("toy", toy_plugin)
    broken = row_of("aaa")
    assert broken.status is PluginStatus.BROKEN
    assert broken.error is not None and cause in broken.error
    assert broken.traceback is not None and "Traceback" in broken.traceback
    assert row_of("toy").status is PluginStatus.OK


@pytest.mark.parametrize(
    ("addition", "cause"),
    [
        ("@hookimpl\ndef lora_no_such_hook(row): ...\n", "unknown hook 'lora_no_such_hook'"),
        ("@hookimpl\ndef lora_hf_name(row, colour): ...\n", "{'colour'} are declared in the hookimpl but"),
        ("def lora_hf_name(row): ...\n", "function lora_hf_name: is named like a hook but not marked"),
        ("def lora_helper(): ...\n", "function lora_helper: is named like a hook but not marked"),
    ],
)
def test_a_hook_the_specification_does_not_know_breaks_the_plugin(
    install: Install, toy_plugin: str, addition: str, cause: str
) -> None:
    install("toy", toy_plugin + addition)
    row = row_of("toy")
    assert row.status is PluginStatus.BROKEN
    assert row.error is not None and cause in row.error


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("x = 1", "registers no architecture"),
        (
            "from lora_plugins_sdk import hookimpl\n@hookimpl\ndef lora_register_architectures(): return ['toy']",
            "not an Arch",
        ),
        ("from lora_plugins_sdk import hookimpl\n@hookimpl\ndef lora_register_architectures(): return 5", "TypeError"),
        (
            "from lora_plugins_sdk import Architecture, hookimpl\n@hookimpl\ndef lora_register_architectures():\n"
            "    return [Architecture(name='toy', model_types=('toy',), sites=())]",
            "no site",
        ),
    ],
)
def test_a_plugin_that_registers_nothing_usable_is_broken(install: Install, source: str, cause: str) -> None:
    install("toy", source)
    row = row_of("toy")
    assert row.status is PluginStatus.BROKEN
    assert row.error is not None and cause in row.error


def test_a_class_is_refused_because_its_hooks_have_no_self(install: Install) -> None:
    install("toy", "class Plugin: ...", value="toy_dist_toy:Plugin")
    row = row_of("toy")
    assert row.status is PluginStatus.BROKEN
    assert row.error is not None and "is a class" in row.error


@pytest.mark.parametrize(
    ("requires_api", "cause"),
    [
        (HOOKSPEC_API, None),
        ((HOOKSPEC_API[0], HOOKSPEC_API[1] + 1), "update lora-plugins-sdk"),
        ((HOOKSPEC_API[0] + 1, 0), "update lora-plugins-sdk"),
        ((HOOKSPEC_API[0] - 1, 9), "update the plugin"),
        ("1.0", "not a pair of integers"),
    ],
)
def test_the_hook_api_that_a_plugin_asks_for_is_checked(
    install: Install, toy_plugin: str, requires_api: object, cause: str | None
) -> None:
    install("toy", f"{toy_plugin}\nrequires_api = {requires_api!r}\n")
    row = row_of("toy")
    if cause is None:
        assert (row.status, row.requires_api) == (PluginStatus.OK, requires_api)
    else:
        assert row.status is PluginStatus.BROKEN
        assert row.error is not None and cause in row.error


def test_two_plugins_for_one_model_type_are_duplicates_that_name_each_other(install: Install, toy_plugin: str) -> None:
    first, second = install("one", toy_plugin), install("two", toy_plugin)
    one, two = row_of("one"), row_of("two")
    assert one.status is two.status is PluginStatus.DUPLICATE
    assert one.error is not None and "model type 'toy_model' is also claimed by two-dist:two" in one.error
    assert two.error is not None and "model type 'toy_model' is also claimed by one-dist:one" in two.error
    assert str(second) in one.error and str(first) in two.error


def test_two_plugins_of_one_name_are_duplicates(install: Install, toy_plugin: str) -> None:
    install("toy", toy_plugin, distribution="left")
    install("toy", toy_plugin.replace("toy", "other"), distribution="right")
    rows = [one for one in discover() if one.name == "toy"]
    assert [one.status for one in rows] == [PluginStatus.DUPLICATE] * 2
    assert rows[0].error is not None and rows[0].error.startswith("plugin name 'toy' is also claimed by right:toy")


def test_load_is_an_allowlist_and_what_it_leaves_out_is_not_imported(
    install: Install, toy_plugin: str, tmp_path: Path
) -> None:
    witness = tmp_path / "imported"
    install("toy", toy_plugin)
    install("other", f"open({str(witness)!r}, 'w')")
    environ = {"LORA_PLUGINS_LOAD": "toy, qwen3"}
    other = row_of("other", environ=environ)
    assert (other.status, other.error) == (PluginStatus.DISABLED, "not in LORA_PLUGINS_LOAD")
    assert row_of("toy", environ=environ).status is PluginStatus.OK
    assert not witness.exists()


def test_an_empty_allowlist_loads_nothing() -> None:
    rows = discover(environ={"LORA_PLUGINS_LOAD": ""})
    assert rows and all(one.status is PluginStatus.DISABLED for one in rows)


def test_disable_leaves_out_the_named_plugins(install: Install, toy_plugin: str) -> None:
    install("one", toy_plugin)
    install("two", toy_plugin)
    environ = {"LORA_PLUGINS_DISABLE": "two"}
    assert row_of("one", environ=environ).status is PluginStatus.OK
    assert row_of("two", environ=environ).error == "in LORA_PLUGINS_DISABLE"


@pytest.mark.parametrize("variable", ["LORA_PLUGINS_LOAD", "LORA_PLUGINS_DISABLE"])
def test_a_variable_that_names_an_unknown_plugin_is_an_error(variable: str) -> None:
    with pytest.raises(LoraError, match=rf"{variable}: qwen33: no such plugin is installed; installed: .*qwen3"):
        discover(environ={variable: "qwen33"})


def test_a_file_is_a_plugin_without_packaging(tmp_path: Path, toy_plugin: str) -> None:
    file = tmp_path / "my_plugin.py"
    file.write_text(toy_plugin)
    row = row_of("my_plugin", files=[file])
    assert (row.status, row.distribution, row.file) == (PluginStatus.OK, None, str(file))


def test_files_of_one_name_do_not_shadow_each_other_or_a_module(tmp_path: Path, toy_plugin: str) -> None:
    import json

    for folder, name in (("a", "alpha"), ("b", "beta")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(toy_plugin.replace("toy", name))
    rows = discover(files=[tmp_path / "a" / "json.py", tmp_path / "b" / "json.py"])
    assert [one.model_types for one in rows[-2:]] == [("alpha_model",), ("beta_model",)]
    assert json.loads("1") == 1


def test_a_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match=r"nope\.py: there is no such file"):
        discover(files=[tmp_path / "nope.py"])


def test_a_file_that_fails_leaves_no_half_made_module_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\n1 / 0\n")
    before = set(sys.modules)
    assert row_of("bad", files=[tmp_path / "bad.py"]).status is PluginStatus.BROKEN
    assert not {name for name in set(sys.modules) - before if name.startswith("_lora_plugin_file")}
