"""What is installed: torch-free where nothing is computed, typed, and without a name that is not ours."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]
(TORCH_FREE,) = (one["source_modules"] for one in CONTRACTS if one["name"].startswith("Torch-free"))

# Stands in for an environment without the `megatron` extra: each of these raises ImportError when imported.
WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "numpy", "safetensors", "transformers", "peft"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
"""


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process in which torch and its company cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["list"], "qwen3       ok "),
        (["list", "--json"], '"status": "ok"'),
        (["doctor"], "no problems found"),
        (["describe", "qwen3", "--hf-config", "CONFIG", "--tp", "2", "--sp"], "self_attn.q_proj.lora_A.weight"),
    ],
)
def test_the_command_line_runs_without_torch(tmp_path: Path, arguments: list[str], output: str) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,'
        ' "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 300}'
    )
    command = ["lora-plugins", *(str(tmp_path) if one == "CONFIG" else one for one in arguments)]
    result = run_without_torch(f"sys.argv = {command!r}\nfrom lora_plugins_sdk.cli import main\nmain()\n")
    assert result.returncode == 0, result.stderr + result.stdout
    assert output in result.stdout


@pytest.mark.parametrize("module", ["lora_plugins_sdk", "lora_plugin_qwen3", *TORCH_FREE])
def test_a_torch_free_module_imports_without_torch(module: str) -> None:
    result = run_without_torch(f"import {module}")
    assert result.returncode == 0, result.stderr


def test_the_wheel_holds_our_packages_and_nothing_else(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith("entry_points.txt"))
        entry_points = archive.read(info).decode()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    plugins = {path.name for path in ROOT.glob("plugins/*/lora_plugin_*")}
    assert top == plugins | {"lora_plugins_sdk", "lora_harness", "lora_sglang_cpu"}
    for package in top:
        assert f"{package}/py.typed" in names
    groups = configparser.ConfigParser()
    groups.read_string(entry_points)
    assert groups["lora_plugins"]["qwen3"] == "lora_plugin_qwen3"
    assert groups["sglang.srt.plugins"]["lora_sglang_cpu"] == "lora_sglang_cpu:activate"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_core_dependencies_are_torch_free() -> None:
    names = {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    assert names == {"packaging", "pluggy", "rich", "typer"}


@pytest.mark.parametrize("file", sorted((ROOT / "constraints").glob("*.txt")), ids=lambda path: path.stem)
def test_tested_versions_lie_within_the_declared_ranges(file: Path) -> None:
    project = PYPROJECT["project"]
    texts = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {canonicalize_name(one.name): one for one in map(Requirement, texts)}
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    for pin in map(Requirement, lines):
        ((operator, version),) = ((one.operator, one.version) for one in pin.specifier)
        assert operator == "=="
        if canonicalize_name(pin.name) in declared:
            assert declared[canonicalize_name(pin.name)].specifier.contains(version), pin


def test_every_in_tree_plugin_is_packaged_and_registered() -> None:
    folders = {path.name for path in ROOT.glob("plugins/*/lora_plugin_*")}
    packages = {Path(one).name for one in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    registered = set(PYPROJECT["project"]["entry-points"]["lora_plugins"].values())
    assert folders == registered == packages - {"lora_plugins_sdk", "lora_harness", "lora_sglang_cpu"}


# What a plugin may import of the SDK besides the names of `lora_plugins_sdk.__all__`.
PUBLIC_MODULES = ("lora_plugins_sdk.errors", "lora_plugins_sdk.hosts.", "lora_plugins_sdk.testing")


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("plugins/*/lora_plugin_*/**/*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_plugin_imports_only_public_names_and_no_other_plugin(file: Path) -> None:
    import lora_plugins_sdk

    own = file.relative_to(ROOT / "plugins").parts[1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{file.name}: relative import"
            modules = {node.module}
            if node.module == "lora_plugins_sdk":
                assert {alias.name for alias in node.names} <= set(lora_plugins_sdk.__all__), file.name
                continue
        else:
            continue
        for module in modules:
            root = module.partition(".")[0]
            assert root != "lora_harness" and (not root.startswith("lora_plugin_") or root == own), module
            assert root != "lora_plugins_sdk" or module.startswith(PUBLIC_MODULES), module
