"""The conformance kit: a wrong plugin cannot pass on a CPU. See docs/conformance.md."""

from __future__ import annotations

from lora_plugins_sdk.testing.conformance.check import Case, Check, Level, Result, Status
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding
from lora_plugins_sdk.testing.conformance.run import cases, run_case, run_cases
from lora_plugins_sdk.testing.conformance.subject import Subject

__all__ = [
    "Case",
    "Check",
    "Context",
    "Finding",
    "Level",
    "Result",
    "Status",
    "Subject",
    "cases",
    "run_case",
    "run_cases",
]
