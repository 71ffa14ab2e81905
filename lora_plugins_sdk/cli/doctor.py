"""`lora-plugins doctor`: what is installed and what is wrong with it. Imports none of what it reports."""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated

import typer
from packaging.requirements import Requirement

from lora_plugins_sdk.cli.list_plugins import as_record
from lora_plugins_sdk.cli.render import print_table
from lora_plugins_sdk.discovered import PluginStatus
from lora_plugins_sdk.discovery import discover
from lora_plugins_sdk.hookspecs import HOOKSPEC_API

DISTRIBUTION = "lora-plugins-sdk"
REPORTED = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers", "peft", "pluggy")
CORE = "core"
TROUBLED = (PluginStatus.BROKEN, PluginStatus.DUPLICATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageReport:
    """One package, what this SDK asks of it, and whether that fits. `needed_by` names extras, or `core`."""

    name: str
    version: str | None
    wanted: str
    needed_by: str | None
    problem: str | None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report versions and plugins; exits with 1 when a plugin or a version is in trouble."""
    packages = package_reports()
    plugins = discover()
    problems = [one.problem for one in packages if one.problem is not None]
    problems += [f"plugin {row.origin}: {row.status}: {row.error}" for row in plugins if row.status in TROUBLED]
    if as_json:
        report = {
            "python": platform.python_version(),
            "sdk": version(DISTRIBUTION),
            "hookspec_api": HOOKSPEC_API,
            "packages": [asdict(one) for one in packages],
            "plugins": [{**as_record(row), "traceback": row.traceback} for row in plugins],
            "problems": problems,
        }
        print(json.dumps(report, indent=2))
    else:
        api = ".".join(map(str, HOOKSPEC_API))
        print(f"{DISTRIBUTION} {version(DISTRIBUTION)}, hook API {api}, Python {platform.python_version()}\n")
        print_table(
            ("PACKAGE", "VERSION", "WANTED", "FOR"),
            [(one.name, one.version or "not installed", one.wanted or "-", one.needed_by or "-") for one in packages],
        )
        print()
        print_table(
            ("PLUGIN", "STATUS", "FROM"),
            [(row.name, str(row.status), row.origin) for row in plugins],
        )
        for row in plugins:
            if row.traceback is not None:
                print(f"\n{row.name} failed here:\n{row.traceback}", end="")
        print("\n" + "\n".join(f"PROBLEM {one}" for one in problems) if problems else "\nno problems found")
    raise typer.Exit(1 if problems else 0)


def package_reports() -> list[PackageReport]:
    """The reported packages against the requirements in this distribution's own metadata."""
    wanted: dict[str, dict[str, Requirement]] = defaultdict(dict)
    for text in requires(DISTRIBUTION) or []:
        requirement = Requirement(text)
        wanted[_extra(requirement)][requirement.name] = requirement
    return [_report(name, wanted) for name in REPORTED]


def _report(name: str, wanted: Mapping[str, Mapping[str, Requirement]]) -> PackageReport:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = None
    having = [extra for extra, requirements in wanted.items() if name in requirements]
    if not having:
        return PackageReport(name=name, version=found, wanted="", needed_by=None, problem=None)
    # Extras include each other; those are shown that include no other one with this package.
    smallest = [one for one in having if not any(wanted[other].keys() < wanted[one].keys() for other in having)]
    specifier = wanted[smallest[0]][name].specifier
    problem = None
    if found is None and CORE in having:
        problem = f"package {name}: not installed -> reinstall {DISTRIBUTION}"
    elif found is not None and not specifier.contains(found, prereleases=True):
        problem = f"package {name}: {found} does not satisfy {specifier} -> install {name}{specifier}"
    needed_by = CORE if CORE in having else ", ".join(sorted(smallest))
    return PackageReport(name=name, version=found, wanted=str(specifier), needed_by=needed_by, problem=problem)


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement belongs to, read from its marker; `CORE` when it has none."""
    _, found, name = str(requirement.marker or "").partition("extra == ")
    return name.split()[0].strip("\"'") if found else CORE
