"""`lora-plugins doctor`: non-zero exactly when something is wrong."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins_sdk import HOOKSPEC_API
from lora_plugins_sdk.cli import doctor


def test_a_healthy_environment_exits_with_0(lora_plugins) -> None:
    result = lora_plugins("doctor")
    assert result.code == 0, result.out
    assert "no problems found" in result.out
    assert f"hook API {HOOKSPEC_API[0]}.{HOOKSPEC_API[1]}" in result.out


def test_json_reports_versions_plugins_and_no_problem(lora_plugins) -> None:
    report = json.loads(lora_plugins("doctor", "--json").out)
    packages = {one["name"]: one for one in report["packages"]}
    assert packages["pluggy"]["version"] == importlib.metadata.version("pluggy")
    assert packages["pluggy"]["needed_by"] == "core"
    assert packages["torch"]["needed_by"] == packages["megatron-core"]["needed_by"] == "megatron"
    assert packages["peft"]["needed_by"] == "harness, kit"
    assert packages["transformer-engine"]["needed_by"] == "te"
    assert "qwen3" in {one["name"] for one in report["plugins"]}
    assert report["problems"] == []


def test_a_broken_plugin_fails_and_shows_where(lora_plugins, install: Callable[..., Path]) -> None:
    file = install("bad", "def helper():\n    return 1 / 0\n\nhelper()\n")
    result = lora_plugins("doctor")
    assert result.code == 1
    assert f'File "{file}", line 2, in helper' in result.out
    assert "PROBLEM plugin bad-dist:bad 1.2" in result.out


def test_duplicates_fail_and_are_named(lora_plugins, install: Callable[..., Path], toy_plugin: str) -> None:
    install("one", toy_plugin)
    install("two", toy_plugin)
    report = lora_plugins("doctor", "--json")
    problems = json.loads(report.out)["problems"]
    assert report.code == 1
    assert len(problems) == 2
    assert "one" in problems[0] and "two-dist:two" in problems[0]


def test_an_api_mismatch_fails(lora_plugins, install: Callable[..., Path], toy_plugin: str) -> None:
    install("toy", f"{toy_plugin}\nrequires_api = {(HOOKSPEC_API[0] + 1, 0)}\n")
    result = lora_plugins("doctor")
    assert result.code == 1
    assert f"this SDK's hook API is {HOOKSPEC_API}" in result.out


@pytest.mark.parametrize(
    ("package", "found", "problem"),
    [
        ("megatron-core", "0.15.0", "package megatron-core: 0.15.0 does not satisfy >=0.16.1"),
        ("pluggy", None, "package pluggy: not installed -> reinstall lora-plugins-sdk"),
        ("sglang", "0.5.0", "package sglang: 0.5.0 does not satisfy ==0.5.23"),
        ("torch", None, None),
        ("torch", "2.14.1+cpu", None),
    ],
)
def test_versions_are_held_against_the_package_s_own_metadata(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str | None, problem: str | None
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name != package:
            return real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor, "version", version)
    (report,) = (one for one in doctor.package_reports() if one.name == package)
    assert (report.version is None) == (found is None)
    if problem is None:
        assert report.problem is None
    else:
        assert report.problem is not None and report.problem.startswith(problem)
