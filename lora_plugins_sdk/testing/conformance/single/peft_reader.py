"""PEFT reads the export: nothing missing, nothing left over, the same policy."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.peft_export import export_adapter
from lora_plugins_sdk.peft_files import PeftAdapter, write_adapter
from lora_plugins_sdk.peft_parameters import hf_parameters, to_parameters
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.compare import compare_logits, scale_ratios
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding
from lora_plugins_sdk.testing.conformance.observe.session import forward_logits, start_session
from lora_plugins_sdk.testing.conformance.problem import Problem, make_problem
from lora_plugins_sdk.testing.conformance.reference import base_directory, quiet_transformers
from lora_plugins_sdk.testing.conformance.subject import Subject
from lora_plugins_sdk.testing.layout import Layout


def export_and_logits(
    subject: Subject, directory: Path, problem: Problem, changes: dict[str, Any]
) -> tuple[PeftAdapter, Tensor]:
    """In a rank: the exported adapter, and the logits of the model that it was exported from."""
    model = start_session(subject, directory, problem.factors, **changes).model
    exported = export_adapter(model)
    cloned = {name: tensor.clone() for name, tensor in exported.tensors.items()}
    return PeftAdapter(tensors=cloned, config=exported.config), forward_logits(model, problem)


def _peft(context: Context) -> Iterator[Finding]:
    yield from _read_by_peft(context)


def _peft_rslora(context: Context) -> Iterator[Finding]:
    yield from _read_by_peft(context, use_rslora=True)


def _read_by_peft(context: Context, **changes: Any) -> Iterator[Finding]:
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    subject = context.subject
    problem, table = make_problem(subject, **changes), subject.table(RunFacts(), **changes)
    directory = base_directory(subject)
    ((exported, expected),) = context.world(export_and_logits, Layout(), subject, directory, problem, changes)
    readable = to_parameters(exported, hf_parameters(subject.selected.architecture, subject.hf_config))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        write_adapter(readable, folder)
        with quiet_transformers():
            base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder).eval()
    for one in warned:
        if "adapter keys" in str(one.message):
            yield Finding(what="PEFT warning", cause=str(one.message))
    read = get_peft_model_state_dict(model, save_embedding_layers=False)
    # Factors of a parameter in HF (experts, a stack, padding rows) have other names or shapes in PEFT.
    changed = {
        name
        for name, tensor in readable.tensors.items()
        if name not in exported.tensors or tensor.shape != exported.tensors[name].shape
    }
    for row in table.rows:
        context.exercised([row.host_module])
        for name, tensor in subject.selected.export_tensor(row, problem.factors[row.init_key]).items():
            if name not in exported.tensors:
                yield factor_finding("exported tensor", row, cause=f"{name} is not in the export")
            elif name in readable.tensors.keys() - changed and (
                name not in read or not torch.equal(read[name], tensor)
            ):
                cause = f"PEFT holds no {name}" if name not in read else f"PEFT holds another {name} than was trained"
                yield factor_finding("exported tensor", row, cause=cause)
    for name in sorted(changed):
        if name not in read or not torch.equal(read[name], readable.tensors[name]):
            yield Finding(what="factors of a parameter", cause=f"PEFT does not hold {name} as it was given")
    for name in sorted(read.keys() - readable.tensors.keys()):
        yield Finding(what="PEFT module", cause=f"PEFT adapts {name}, which the export does not have")
    with torch.no_grad():
        logits = torch.stack([model(tokens).logits for tokens in problem.tokens])
    cause = "PEFT applies the exported adapter differently: look at adapter_config.json (r, lora_alpha, use_rslora)"
    yield from compare_logits("logits under PEFT", expected, logits, cause, ratios=scale_ratios(table.lora))


CHECKS = tuple(
    Check(
        name=name,
        level=Level.SINGLE,
        proves=f"PEFT reads every exported tensor{how} and transformers then gives the host's logits.",
        run=run,
        needs=("build-model", "peft"),
    )
    for name, how, run in (("peft", "", _peft), ("peft-rslora", " of a rank-stabilised adapter", _peft_rslora))
)
