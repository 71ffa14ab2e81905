"""The pytest side: three lines give one test per check, a summary, and clear words for what was not run."""

from pathlib import Path

import pytest
import torch  # noqa: F401 - a `pytester` test forgets what it imports, and torch cannot be imported twice

from lora_plugins_sdk.testing.conformance import Level, cases

pytest_plugins = "pytester"

THREE_LINES = """
from lora_plugins_sdk.testing import PluginConformance

class TestMine(PluginConformance):
    architecture = "qwen3"
"""


def test_three_lines(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=THREE_LINES)
    result = pytester.runpytest_subprocess("--conformance-level", "0", "--update-table-snapshot", "-v")
    result.assert_outcomes(passed=len(cases(Level.STATIC)), deselected=_above_0())
    result.stdout.fnmatch_lines(
        [
            "*::TestMine::test_static?packs? PASSED*",
            "*conformance of test_mine.py::TestMine*",
            "CHECK*RESULT*linear_qkv*output_layer*",
            "packs *passed *all *all*",
            f"{len(cases(Level.STATIC))} passed (L0 *",
            "NOT RUN L1 *: not asked for",
            "NOT RUN L3 *: not asked for",
        ]
    )
    assert (pytester.path / "qwen3.table.md").is_file()
    again = pytester.runpytest_subprocess("--conformance-level", "0", "-k", "snapshot")
    again.assert_outcomes(passed=1, deselected=_above_0() + len(cases(Level.STATIC)) - 1)


def test_ids_name_check_and_layout(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=THREE_LINES)
    result = pytester.runpytest_subprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(
        [
            "test_mine.py::TestMine::test_single?fold-gradients?",
            "test_mine.py::TestMine::test_parallel?tp2xpp2+sp-input-gradients?",
            "test_mine.py::TestMine::test_device?gpu?",
        ]
    )


def test_a_wrong_plugin_and_an_opt_out(pytester: pytest.Pytester, wrong_plugin: Path) -> None:
    pytester.makepyfile(
        test_mine=THREE_LINES
        + f"    plugin = {str(wrong_plugin)!r}\n"
        + "    lacks = {'tensor-parallel': 'not written yet', 'peft-names': 'its names are other ones'}\n"
        + "    table_snapshot = 'accepted.md'\n"
    )
    result = pytester.runpytest_subprocess("-k", "peft-names or snapshot")
    result.assert_outcomes(xfailed=1, failed=1, deselected=_above_0() + len(cases(Level.STATIC)) - 2)
    result.stdout.fnmatch_lines(
        [
            "*accepted.md does not exist: write it with pytest --update-table-snapshot*",
            "LACKING peft-names: its names are other ones (1 cases: peft-names*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_what_the_machine_has_not_is_skipped_with_the_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(test_mine=THREE_LINES)
    result = pytester.runpytest_subprocess("-k", "test_device", "-rs")
    result.assert_outcomes(skipped=2, deselected=_above_0() + len(cases(Level.STATIC)) - 2)
    result.stdout.fnmatch_lines(["NOT RUN gpu: torch finds no CUDA device", "NOT RUN transformer-engine: *CUDA*"])


def test_the_summary_survives_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=THREE_LINES)
    result = pytester.runpytest_subprocess("-n", "1", "-k", "test_static and not snapshot")
    passed = len(cases(Level.STATIC)) - 1
    result.assert_outcomes(passed=passed)
    result.stdout.fnmatch_lines(
        ["*conformance of test_mine.py::TestMine*", "packs *passed *all *all*", f"{passed} passed (L0 *"]
    )


def test_suites_of_one_name_have_a_summary_each(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=THREE_LINES, test_other=THREE_LINES.replace("qwen3", "qwen36_moe"))
    result = pytester.runpytest_subprocess("--conformance-level", "0", "-k", "packs")
    result.stdout.fnmatch_lines(
        [
            "*conformance of test_mine.py::TestMine*",
            "1 passed *",
            "*conformance of test_other.py::TestMine*",
            "1 passed *",
        ]
    )


def _above_0() -> int:
    return sum(len(cases(level)) for level in Level if level > 0)
