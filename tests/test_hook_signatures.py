"""The hook API is what plugins were written against: a change here needs a new `HOOKSPEC_API`."""

from __future__ import annotations

import inspect
from typing import Any

from lora_plugins_sdk import HOOKSPEC_API, hookspecs

# Frozen for one version of the API. A new hook or argument: add it here and raise the second number. A removal or a new
# meaning: raise the first.
API = (1, 3)
SIGNATURES = {
    "lora_register_architectures": "",
    "lora_validate_run": "architecture, hf_config, lora, facts",
    "lora_normalize_targets": "architecture, hf_config, lora",
    "lora_grad_sum_groups": "row, facts",
    "lora_hf_name": "row",
    "lora_serving_names": "row, hf_config",
    "lora_site_delta": "plan, run",
    "lora_attach_site": "module, plan, lora, run, delta",
    "lora_export_tensor": "row, tensor",
    "lora_import_tensor": "row, tensors",
    "lora_build_model": "architecture, hf_config, run, dtype, overrides",
    "lora_base_weights": "architecture, hf_config",
    "lora_base_tensors": "architecture, hf_config, stored",
    "lora_published_base": "architecture, base",
    "lora_read_adapter": "architecture, hf_config, saved",
    "lora_after_attach": "adapter",
    "lora_after_export": "tensors, config",
    "lora_on_error": "error, stage",
}
FIRST_RESULT = {
    "lora_normalize_targets",
    "lora_grad_sum_groups",
    "lora_hf_name",
    "lora_serving_names",
    "lora_site_delta",
    "lora_attach_site",
    "lora_export_tensor",
    "lora_import_tensor",
    "lora_build_model",
    "lora_base_weights",
    "lora_base_tensors",
    "lora_published_base",
    "lora_read_adapter",
}


def specifications() -> dict[str, Any]:
    """Hook name -> its specification."""
    return {name: one for name, one in vars(hookspecs).items() if name.startswith("lora_") and inspect.isfunction(one)}


def test_signatures_are_those_of_this_api_version() -> None:
    found = {name: ", ".join(inspect.signature(one).parameters) for name, one in specifications().items()}
    assert (HOOKSPEC_API, found) == (API, SIGNATURES)


def test_the_way_results_are_taken_is_that_of_this_api_version() -> None:
    found = {name for name, one in specifications().items() if one.lora_plugins_spec["firstresult"]}
    assert found == FIRST_RESULT


def test_every_argument_is_typed() -> None:
    for name, one in specifications().items():
        signature = inspect.signature(one)
        annotations = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
        assert inspect.Parameter.empty not in annotations, name
