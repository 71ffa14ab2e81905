"""The plugin speaks the hook API, and needs no torch to say what it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.examine import architectures_of, check_api
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding

HEAVY = ("megatron", "numpy", "safetensors", "torch", "transformers")

_PROBE = """
import json, sys
before = set(sys.modules)
from lora_plugins_sdk.selection import load_plugin
load_plugin(architecture=sys.argv[1], plugin=sys.argv[2] or None)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
_PROBE_SECONDS = 60


def _hooks(context: Context) -> Iterator[Finding]:
    selected = context.subject.selected
    plugin = selected.manager.get_plugin(selected.name)
    try:
        check_api(plugin)
        names = [one.name for one in architectures_of(plugin, selected.name)]
    except LoraError as error:
        yield Finding(what=f"plugin {selected.name}", cause=str(error))
        return
    if selected.architecture.name not in names:
        cause = f"registers {', '.join(names)} when asked again, not {selected.architecture.name}"
        yield Finding(what=f"plugin {selected.name}", cause=cause)


def _torch_free(context: Context) -> Iterator[Finding]:
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, context.subject.architecture, context.subject.plugin or ""],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
        check=False,
    )
    if probe.returncode:
        yield Finding(what="loading in a fresh process", cause=probe.stderr.strip())
        return
    for name in sorted(set(json.loads(probe.stdout)) & set(HEAVY)):
        cause = f"imports {name}, and `lora-plugins list` must work without it: import it within the hook"
        yield Finding(what="loading in a fresh process", cause=cause)


CHECKS = (
    Check(
        name="hooks",
        level=Level.STATIC,
        proves="Every hook is marked, known and takes known arguments; the hook API version fits.",
        run=_hooks,
    ),
    Check(
        name="torch-free",
        level=Level.STATIC,
        proves="Loading the plugin imports neither torch nor megatron-core.",
        run=_torch_free,
    ),
)
