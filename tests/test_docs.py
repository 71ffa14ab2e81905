"""The documentation is true: its code runs, its commands exist, its generated parts are those of the code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from lora_plugins_sdk import hookspecs

ROOT = Path(__file__).parent.parent
PARTLY_GENERATED = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HOOKS = [one for name, one in vars(hookspecs).items() if name.startswith("lora_") and inspect.isfunction(one)]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# What a page's code takes for granted. The README's reader has a model; here it is a small Qwen3 on this CPU.
PRELUDES = {
    "README.md": """
import json
import torch
from lora_plugins_sdk import RunFacts, load_plugin
from lora_plugins_sdk.hosts.initialize import initialize_megatron

config = dict(model_type="qwen3", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config |= dict(head_dim=8, intermediate_size=48, vocab_size=64, max_position_embeddings=32, rms_norm_eps=1e-6)
config |= dict(rope_theta=10000.0, tie_word_embeddings=False, hidden_act="silu")
hf_directory = "."
json.dump(config, open("config.json", "w"))
torch.manual_seed(0)
model = load_plugin("qwen3").build_model(config, initialize_megatron(RunFacts()), torch.float32)
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.05)
tokens = torch.randint(0, 64, (2, 9))
batches = [(tokens[:, :-1], torch.arange(8).expand(2, 8), tokens[:, 1:])] * 2
before = [weight.clone() for weight in model.parameters()]
""",
    "adapters.md": """
import json
from pathlib import Path
import torch
from safetensors.torch import save_file

Path("base").mkdir()
Path("adapter").mkdir()
module = "model.layers.0.mlp.up_proj"
factors = {"A": torch.randn(2, 8), "B": torch.randn(6, 2)}
save_file({f"{module}.weight": torch.randn(6, 8)}, "base/model.safetensors")
save_file(
    {f"base_model.model.{module}.lora_{name}.weight": factor for name, factor in factors.items()},
    "adapter/adapter_model.safetensors",
)
Path("base/config.json").write_text(json.dumps({"model_type": "toy"}))
config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
Path("adapter/adapter_config.json").write_text(json.dumps(config))
""",
    "writing-a-plugin.md": 'import json\n\nconfig = json.load(open("config.json"))\n',
}
PRELUDES["own-trainer.md"] = PRELUDES["README.md"]
# What the page's code must have done.
CHECKS = {
    "README.md": """
from safetensors.torch import load_file
saved = load_file("adapter/adapter_model.safetensors")
assert len(saved) == 2 * 7 * 2 and all(tensor.abs().sum() > 0 for tensor in saved.values())
base = [weight for name, weight in model.named_parameters() if ".lora." not in name]
assert all(torch.equal(was, now) for was, now in zip(before, base, strict=True))
""",
    "own-trainer.md": """
assert len(exported.tensors) == 2 * 7 * 2 and all(tensor.abs().sum() > 0 for tensor in exported.tensors.values())
""",
    "adapters.md": "assert report.folds == 1 and Path('merged-in-python/config.json').exists()",
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    file: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order."""
    found = []
    for language, info, text in FENCE.findall(page.read_text()):
        file = re.search(r"file=(\S+)", info)
        found.append(Block(language=language, file=file[1] if file else None, text=text))
    return found


def write_files(page: Path, folder: Path) -> None:
    """The blocks that a page shows as files; several blocks of one file make it up in order."""
    files: dict[str, str] = {}
    for block in blocks(page):
        if block.file is not None:
            files[block.file] = "\n\n".join(filter(None, [files.get(block.file), block.text]))
    for name, text in files.items():
        (folder / name).write_text(text)


def run_python(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's code, from top to bottom, in one fresh process."""
    write_files(page, folder)
    code = [block.text for block in blocks(page) if block.language == "python" and block.file is None]
    script = folder / "page.py"
    script.write_text("\n".join([PRELUDES.get(page.name, ""), *code, CHECKS.get(page.name, "")]))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=folder, timeout=240, env=environ
    )


def generator() -> ModuleType:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands_of(program: str) -> dict[str, Any]:
    """Name -> command of one of our command lines."""
    module = {"lora-plugins": "lora_plugins_sdk.cli.app", "lora-grpo": "lora_harness.cli"}[program]
    group: Any = typer.main.get_command(importlib.import_module(module).app)
    return group.commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    result = run_python(page, tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_readme_and_the_plugin_guide_have_code_to_run() -> None:
    for name in PRELUDES:
        (page,) = (one for one in PAGES if one.name == name)
        assert any(block.language == "python" and block.file is None for block in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_and_lora_plugins_commands_succeed(page: Path, tmp_path: Path) -> None:
    lines = [line for block in blocks(page) if block.language == "console" for line in block.text.splitlines()]
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
    if any(command[0] == "lora-plugins" for command in commands):
        run_python(page, tmp_path)  # leaves the files that the commands read
    for program, *arguments in commands:
        if program == "lora-plugins":
            code = "from lora_plugins_sdk.cli import main; main()"
            result = subprocess.run(
                [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60
            )
            assert result.returncode == 0, f"{program} {arguments}: {result.stderr}{result.stdout}"
        elif program == "lora-grpo":
            assert arguments[0] in commands_of(program), arguments
        elif program == "torchrun":
            module, command = arguments[arguments.index("-m") + 1 :][:2]
            assert importlib.util.find_spec(f"{module}.__main__") and command in commands_of("lora-grpo")
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), arguments
        else:
            pytest.fail(f"{page.name} shows `{program}`, which this test does not know how to check")


def test_the_plugin_of_the_guide_is_a_package_that_installs(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "writing-a-plugin.md", tmp_path)  # its tests and configs too, as in the reader's folder
    build = "import hatchling.build; print(hatchling.build.build_wheel('.'))"
    made = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        names = [name for name in package.namelist() if ".dist-info/" not in name]
        package.extractall(tmp_path / "site")
    assert names == ["my_llama.py"]
    code = "from lora_plugins_sdk.cli import main; main()"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    listed = subprocess.run(
        [sys.executable, "-P", "-c", code, "list"], capture_output=True, text=True, env=environ, timeout=60
    )
    assert re.search(r"^my_llama +ok +my_llama +llama ", listed.stdout, re.MULTILINE), listed.stdout + listed.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_toml_blocks_parse_and_the_training_config_is_accepted() -> None:
    from lora_harness.config import parse_config

    parsed = [(page, block) for page in PAGES for block in blocks(page) if block.language == "toml"]
    assert parsed
    for page, block in parsed:
        content = tomllib.loads(block.text)
        if page.name == "harness-config.md":
            parse_config(content)


@pytest.mark.parametrize("page", PARTLY_GENERATED, ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_fresh(page: Path) -> None:
    assert page.read_text() == generator().regenerate(page.read_text()), "run `make docs`"


def test_every_generated_part_has_a_place() -> None:
    text = "".join(page.read_text() for page in PARTLY_GENERATED)
    for name in generator().BLOCKS:
        assert text.count(f"<!-- begin generated: {name} -->") == 1, name


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_has_a_heading_its_exact_signature_and_a_row_for_each_argument(hook) -> None:
    page = (ROOT / "docs" / "hooks.md").read_text()
    _, found, section = page.partition(f"\n### {hook.__name__}\n")
    assert found, "no heading"
    section = section.partition("\n### ")[0]
    signature = inspect.signature(hook)
    arguments = ", ".join(f"{name}: {one.annotation}" for name, one in signature.parameters.items())
    assert f"\n{hook.__name__}({arguments}) -> {signature.return_annotation}\n" in section
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert documented == list(signature.parameters)


@pytest.mark.parametrize("program", ["lora-plugins", "lora-grpo"])
def test_every_command_and_option_is_documented(program: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name, command in commands_of(program).items():
        _, found, section = page.partition(f"\n### {program} {name}")
        assert found, name
        section = re.split(r"\n##+ ", section)[0]
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else []:
                assert option in ("--help", "-h") or f"`{option}`" in section, f"{name} {option}"


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "lora_plugins_sdk").rglob("*.py"))
    names = set(re.findall(r"\"(LORA_PLUGINS_[A-Z_]+)\"", sources))
    assert {"LORA_PLUGINS_LOAD", "LORA_PLUGINS_DISABLE", "LORA_PLUGINS_TRACE"} <= names
    for name in names:
        assert f"| `{name}` |" in page, name
