"""Read files that promise far more than they hold; print how much memory that took. Run as a script."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from malformed import JSON, SAFETENSORS
from offline_files import make_adapter, make_base

from lora_plugins_sdk import LoraError, read_hf_config
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.inspect import base_facts
from lora_plugins_sdk.offline.merge import merge, plan_merge
from lora_plugins_sdk.selection import load_plugin
from lora_plugins_sdk.targets import candidates

LIES = ("terabyte", "all bits", "into the data", "nested", "overflow", "beyond", "of a zero")


def peak() -> int:
    """Largest resident size so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(place: Path) -> None:
    base, adapter = make_base(place / "base"), make_adapter(place / "adapter")
    merge(plan_merge(base, adapter, place / "good"))
    base_facts(read_plain_adapter(adapter), base)
    plugin = load_plugin(architecture="qwen3")
    tiny = dict(plugin.architecture.tiny_config)
    before, cases, refused = peak(), 0, 0
    files = {base / "model.safetensors": SAFETENSORS, adapter / "adapter_model.safetensors": SAFETENSORS}
    files |= {base / "config.json": JSON, adapter / "adapter_config.json": JSON}
    for file, damages in files.items():
        content = file.read_bytes()
        for name, damage in damages.items():
            if any(lie in name for lie in LIES):
                file.write_bytes(damage(content))
                cases += 1
                try:
                    merge(plan_merge(base, adapter, place / "merged"))
                except LoraError:
                    refused += 1
        file.write_bytes(content)
    for layers in (10**9, 10**18, -1, 0):
        (base / "config.json").write_text(json.dumps({**tiny, "num_hidden_layers": layers}))
        cases += 1
        try:
            candidates(plugin.architecture, read_hf_config(base))
        except LoraError:
            refused += 1
    huge = base / "config.json"
    with huge.open("wb") as file:
        file.truncate(10 * 1024**4)  # sparse: ten terabytes that take no disk
    cases += 1
    try:
        read_hf_config(base)
    except LoraError:
        refused += 1
    print(json.dumps({"cases": cases, "refused": refused, "grown_mb": peak() - before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
