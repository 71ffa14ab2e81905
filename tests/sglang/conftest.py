"""Fixtures of the tests of the real SGLang on the CPU, which `make test-sglang` runs in their own environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import raw_engine
import transformers_reference
from own_process import OwnProcess

HERE = Path(__file__).parent

try:
    version("sglang")
except PackageNotFoundError:
    collect_ignore_glob = ["*"]  # .venv has no SGLang; `make test-sglang` fails if it finds no test


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test under this folder has the marker `sglang`, and time for an engine's start on a busy machine."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A skipped test here is a failed one: nothing of SGLang may be missing where these tests run."""
    report = yield
    if report.skipped and HERE in item.path.parents and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a test of the real SGLang was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def reference() -> Iterator[OwnProcess]:
    """A process with transformers and PEFT in which SGLang is never imported:
    `reference.run(transformers_reference.token_logprobs, ...)`."""
    with OwnProcess() as process:
        yield process


@pytest.fixture(scope="session")
def tiny_qwen3_dir(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 with random fp32 weights and no tokenizer (`skip_tokenizer_init`)."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    reference.run(transformers_reference.make_qwen3, str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_adapter(reference: OwnProcess, tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter with random factors on every target of `tiny_qwen3_dir`, embedding and head too; its rank is 4."""
    folder = tmp_path_factory.mktemp("tiny_qwen3_adapter")
    reference.run(transformers_reference.make_peft_adapter, str(tiny_qwen3_dir), str(folder))
    return folder


@pytest.fixture(scope="session")
def running_engine() -> Callable[..., AbstractContextManager[OwnProcess]]:
    """Starts SGLang's engine in a process of its own: `with running_engine(folder, **arguments) as engine:
    engine.run(raw_engine.generate, ...)`.

    A start takes 15 to 30 s: share one among the tests of a module.
    """

    @contextmanager
    def run(model: Path, **arguments: Any) -> Iterator[OwnProcess]:
        with OwnProcess() as process:
            process.run(raw_engine.start, str(model), **arguments)
            yield process
            process.run(raw_engine.stop)

    return run
