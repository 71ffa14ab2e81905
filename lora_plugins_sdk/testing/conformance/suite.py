"""The pytest class that a plugin's author subclasses in three lines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lora_plugins_sdk.testing.conformance.check import Case, Level, Result, Status
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.layouts import layouts_of
from lora_plugins_sdk.testing.conformance.report import failure_text
from lora_plugins_sdk.testing.conformance.run import cases, run_case
from lora_plugins_sdk.testing.conformance.subject import Subject

UPDATE_OPTION = "--update-table-snapshot"
PROPERTY = "lora_conformance"


@pytest.mark.conformance
class PluginConformance:
    """Subclass it in a test file under a name that starts with `Test`, and set `architecture`::

        class TestMyModel(PluginConformance):
            architecture = "my_model"

    pytest then shows one test for each check, and at level 2 for each check and layout.

    Attributes:
        architecture: the architecture's name.
        hf_config: a tiny HF config, as a mapping, a file or a directory; the architecture's `tiny_config` when None.
        plugin: the plugin's name or file where two serve the architecture.
        lacks: capability -> reason; the architecture's own when None. A check that needs one of them must fail.
        table_snapshot: file with the accepted parameter table; `<architecture>.table.md` beside the test when None.
        options: further fields of `Subject`, such as `sequence_length` or `seed`.
    """

    architecture: ClassVar[str]
    hf_config: ClassVar[Mapping[str, Any] | str | Path | None] = None
    plugin: ClassVar[str | None] = None
    lacks: ClassVar[Mapping[str, str] | None] = None
    table_snapshot: ClassVar[str | Path | None] = None
    options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """One test for each case of the test method's level."""
        level = _LEVELS.get(metafunc.function.__name__)
        if level is not None:
            layouts = layouts_of(cls.subject().selected.architecture) if level is Level.PARALLEL else ()
            metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases(level, layouts)])

    @classmethod
    def subject(cls) -> Subject:
        """What is tested."""
        return Subject.of(cls.architecture, hf_config=cls.hf_config, plugin=cls.plugin, lacks=cls.lacks, **cls.options)

    @pytest.fixture(scope="class")
    @classmethod
    def conformance(cls, request: pytest.FixtureRequest) -> Context:
        """The context that the checks of this class share."""
        file = Path(inspect.getfile(cls))
        return Context(
            cls.subject(),
            snapshot=Path(cls.table_snapshot or file.parent / f"{cls.architecture}.table.md"),
            update_snapshot=bool(request.config.getoption(UPDATE_OPTION)),
            how_to_update=f"pytest {UPDATE_OPTION}",
        )

    def test_static(self, case: Case, conformance: Context, request: pytest.FixtureRequest) -> None:
        """Level 0, without torch."""
        _run(request, conformance, case)

    def test_single(self, case: Case, conformance: Context, request: pytest.FixtureRequest) -> None:
        """Level 1, one process against transformers and PEFT."""
        _run(request, conformance, case)

    def test_parallel(self, case: Case, conformance: Context, request: pytest.FixtureRequest) -> None:
        """Level 2, parallel layouts against one process."""
        _run(request, conformance, case)

    def test_device(self, case: Case, conformance: Context, request: pytest.FixtureRequest) -> None:
        """Level 3, on the machine's accelerator."""
        _run(request, conformance, case)


_LEVELS = {f"test_{level.name.lower()}": level for level in Level}


def _run(request: pytest.FixtureRequest, context: Context, case: Case) -> None:
    result = run_case(context, case)
    # Built-in types only: with pytest-xdist they travel to the process that prints the summary. A suite is known by its
    # file too, since classes of two files may have one name.
    place = request.node.nodeid.partition("[")[0].rpartition("::")[0]
    record = {"suite": place, "sites": context.subject.site_modules(), "result": result.record()}
    request.node.user_properties.append((PROPERTY, record))
    _conclude(result)


def _conclude(result: Result) -> None:
    if result.status is Status.NOT_RUN:
        pytest.skip(result.reason)
    if result.status is Status.LACKING:
        pytest.xfail(result.reason)
    if not result.status.good:
        pytest.fail(failure_text(result), pytrace=False)
