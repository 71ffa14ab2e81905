"""Overrides of the torch-free hooks: each takes effect, for the selected plugin only."""

from collections.abc import Iterator
from typing import Any

import pytest
from sdk_toy import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import (
    Diagnostic,
    LoraConfig,
    LoraError,
    ParameterTable,
    RunFacts,
    SelectedPlugin,
    derive_table,
    hookimpl,
)
from lora_plugins_sdk.manager import new_manager

LORA = LoraConfig(rank=2)
SP = RunFacts(tp=2, sequence_parallel=True)


def table(plugin: Any, facts: RunFacts | None = None) -> ParameterTable:
    return derive_table(SelectedPlugin.of(ARCHITECTURE, plugin), HF_CONFIG, LORA, facts or RunFacts())


class Validates:
    @hookimpl
    def lora_validate_run(self, hf_config: Any, facts: RunFacts) -> Iterator[Diagnostic]:
        yield Diagnostic(subject="this plugin", reason=f"dislikes dp {facts.dp}", cure="use another")


class PicksTargets:
    @hookimpl
    def lora_normalize_targets(self) -> frozenset[str]:
        return frozenset({"model.layers.1.self_attn.q_proj"})


class Renames:
    @hookimpl
    def lora_hf_name(self, row: Any) -> str:
        return f"peft.{row.hf_module}.{row.factor}"

    @hookimpl
    def lora_serving_names(self, row: Any) -> dict[str, str]:
        return {"engine": row.hf_name.upper()}


class NeverSums:
    @hookimpl
    def lora_grad_sum_groups(self, row: Any) -> str:
        return "none"


class SumsOverNothingKnown:
    @hookimpl
    def lora_grad_sum_groups(self, row: Any) -> str:
        return "galaxy"


class OneNameForAll:
    @hookimpl
    def lora_hf_name(self, row: Any) -> str:
        return f"same.{row.factor}"


class ExportsOnly:
    @hookimpl
    def lora_export_tensor(self, row: Any, tensor: Any) -> dict[str, Any]:
        return {row.hf_name: tensor}


class ImportsOnly:
    @hookimpl
    def lora_import_tensor(self, row: Any, tensors: Any) -> Any:
        return tensors[row.hf_name]


def test_a_finding_of_the_plugin_joins_the_sdks_own() -> None:
    with pytest.raises(LoraError) as error:
        table(Validates(), RunFacts(tp=3, dp=2))
    subjects = {one.subject for one in error.value.diagnostics}
    assert subjects == {"this plugin", "tensor parallel size 3"}


def test_targets() -> None:
    assert {row.hf_module for row in table(PicksTargets()).rows} == {"model.layers.1.self_attn.q_proj"}


def test_names() -> None:
    rows = table(Renames()).rows
    assert all(row.hf_name == f"peft.{row.hf_module}.{row.factor}" for row in rows)
    assert all(row.serving_names == {"engine": row.hf_name.upper()} for row in rows)


def test_gradient_sums() -> None:
    assert {row.grad_sum_group for row in table(None, SP).rows} == {"tp", None}
    assert {row.grad_sum_group for row in table(NeverSums(), SP).rows} == {None}


def test_an_unknown_gradient_sum_group_is_refused() -> None:
    with pytest.raises(LoraError, match=r"answers 'galaxy' for .*answer one of none, tp"):
        table(SumsOverNothingKnown())


def test_one_name_for_two_factors_is_refused() -> None:
    with pytest.raises(LoraError, match="gives one name to several factors") as error:
        table(OneNameForAll())
    assert [one.subject for one in error.value.diagnostics] == ["same.A", "same.B"]


@pytest.mark.parametrize("plugin", [ExportsOnly(), ImportsOnly()], ids=["export", "import"])
def test_export_and_import_are_overridden_together(plugin: Any) -> None:
    with pytest.raises(LoraError, match="overrides only one of lora_export_tensor and lora_import_tensor"):
        SelectedPlugin.of(ARCHITECTURE, plugin)


@pytest.mark.parametrize("other", [PicksTargets, Renames, Validates, SumsOverNothingKnown])
def test_plugins_of_other_models_are_not_asked(other: Any) -> None:
    manager = new_manager()
    manager.register(object(), "mine")
    manager.register(other(), "other")
    mine = SelectedPlugin(name="mine", version="", architecture=ARCHITECTURE, manager=manager)
    assert derive_table(mine, HF_CONFIG, LORA, RunFacts()).rows == table(None).rows
