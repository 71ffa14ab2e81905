"""Fixtures for the tests of discovery, the command line and packaging; and the order in which all test files start."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no fault of the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

TOY_PLUGIN = """
from lora_plugins_sdk import Architecture, Projection, Site, SiteKind, hookimpl


@hookimpl
def lora_register_architectures():
    down = Projection(hf="model.layers.{layer}.down_proj", in_dim="intermediate_size", out_dim="hidden_size")
    site = Site(path="decoder.layers.{layer}.linear_fc2", kind=SiteKind.ROW, projections=(down,))
    return [Architecture(name="toy", model_types=("toy_model",), sites=(site,))]
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that may take longest come first: the last of several workers would be alone with them at the end."""
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        limit = item.get_closest_marker("timeout")
        slow = item.get_closest_marker("slow") is not None
        seconds[item.path] += (limit.args[0] if limit and limit.args else 300) / 10 if slow else 0.5
    items.sort(key=lambda item: -seconds[item.path])


@dataclass(frozen=True)
class CommandResult:
    """What one run of `lora-plugins` left."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def no_megatron_left_behind() -> Iterator[None]:
    """megatron-core that a test started in this process ends with it: other files follow here, in any order."""
    yield
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        import torch.distributed as dist

        state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def toy_plugin() -> str:
    """Source of a plugin that serves model type `toy_model` and nothing else."""
    return TOY_PLUGIN


@pytest.fixture
def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on `sys.path` for fake distributions; their modules are forgotten afterwards."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(site) if path is None else f"{site}{os.pathsep}{path}")
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(site)):
            del sys.modules[name]


@pytest.fixture
def install(plugin_site: Path) -> Callable[..., Path]:
    """Install a fake distribution with one plugin: `install(name, source, ...)` returns its module's file."""

    def install_plugin(
        name: str, source: str, *, distribution: str | None = None, version: str = "1.2", value: str | None = None
    ) -> Path:
        distribution = distribution or f"{name}-dist"
        module = f"{distribution}_{name}".replace("-", "_")
        file = plugin_site / f"{module}.py"
        file.write_text(source)
        info = plugin_site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[lora_plugins]\n{name} = {value or module}\n")
        importlib.invalidate_caches()
        return file

    return install_plugin


@pytest.fixture
def lora_plugins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Run `lora-plugins` with these arguments in this process."""
    from lora_plugins_sdk.cli import main

    def run(*arguments: str) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["lora-plugins", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        assert isinstance(code, int | None)
        captured = capsys.readouterr()
        return CommandResult(code=code or 0, out=captured.out, err=captured.err)

    return run
