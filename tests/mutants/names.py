"""Names, targets and the plugin itself: off by one, shared by two factors, or not what the user asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import lora_plugin_qwen3
from lora_plugins_sdk import LoraConfig, ParamRow, RunFacts, SelectedPlugin, host_modules
from lora_plugins_sdk.testing.conformance import Level
from mutants.mutant import seeded
from mutants.places import FC1, PP2
from mutants.seams import rows_changed, wrapped

_LAST = "decoder.layers.3.mlp.linear_fc2"


@seeded("peft-names", level=Level.STATIC, imitates="B29", site=_LAST, words="model.layers.4.mlp.down_proj")
def layer_name_off_by_one() -> Iterator[None]:
    """The last layer's down projection gets the number of a layer that does not exist."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        return replace(row, hf_name=row.hf_name.replace("3", "4")) if row.host_module == _LAST else row

    with rows_changed(change):
        yield


@seeded("peft-names", level=Level.STATIC, imitates="B29", site=FC1, words="PEFT would skip it")
def prefix_missing() -> Iterator[None]:
    """One site's names lack the prefix under which PEFT looks for them."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        bare = row.hf_name.removeprefix("base_model.model.")
        return replace(row, hf_name=bare) if row.host_module == FC1 else row

    with rows_changed(change):
        yield


@seeded("unique-names", level=Level.STATIC, imitates="B24", site=FC1, words="is also that of")
def gate_loaded_twice() -> Iterator[None]:
    """The engine's name of up is that of gate."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        names = {engine: name.replace("up_proj", "gate_proj") for engine, name in row.serving_names.items()}
        return replace(row, serving_names=names) if row.host_module == FC1 else row

    with rows_changed(change):
        yield


@seeded("pairs", level=Level.STATIC, imitates="a pair torn apart", site=FC1, words="B on")
def factors_on_two_linears() -> Iterator[None]:
    """The B of up lies on another linear than its A."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        lost = (row.host_module, row.param) == (FC1, "B_up_proj")
        return replace(row, host_module=FC1.replace("fc1", "fc2")) if lost else row

    with rows_changed(change):
        yield


@seeded("targets", level=Level.STATIC, imitates="B29", words="is excluded")
def exclusion_ignored() -> Iterator[None]:
    """`exclude_modules` has no effect."""

    def normalize(right: Any, plugin: SelectedPlugin, hf_config: Any, lora: LoraConfig) -> frozenset[str]:
        return right(plugin, hf_config, replace(lora, exclude_modules=()))

    with wrapped(SelectedPlugin, "normalize_targets", normalize):
        yield


@seeded("hooks", level=Level.STATIC, imitates="hook missed (B20)", words="would never be called")
def hook_not_marked() -> Iterator[None]:
    """The plugin has a function named like a hook that nothing marks as one."""
    with patch.object(lora_plugin_qwen3, "lora_hf_name", lambda row: row.hf_module, create=True):
        yield


@seeded("torch-free", level=Level.STATIC, imitates="heavy import", words="imports torch")
def plugin_imports_torch() -> Iterator[None]:
    """The plugin imports torch when it is loaded."""
    real = Path(lora_plugin_qwen3.__file__).parent
    with TemporaryDirectory() as folder, patch.object(sys, "path", [folder, *sys.path]):
        main = copytree(real, Path(folder, real.name)) / "__init__.py"
        main.write_text(main.read_text().replace("annotations\n", "annotations\n\nimport torch\n", 1))
        yield


@seeded("completes", PP2, imitates="B22", words="decoder.layers.2.self_attention.linear_qkv and 7 more")
def layers_counted_per_stage() -> Iterator[None]:
    """The second pipeline stage numbers its layers from 0."""
    with wrapped(host_modules, "_global_layer", lambda right, chunk, name, path, match: int(match.group(2))):
        yield
