"""Write an adapter anew: as PEFT directory with a config that every PEFT reads, or in the form of a serving engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lora_plugins_sdk.adapter_files import adapter_directory, adapter_weights
from lora_plugins_sdk.adapter_meta import AdapterOrigin
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.offline.adapter import PlainAdapter, in_hf_names, plain_adapter
from lora_plugins_sdk.offline.fit import config_values, fit, trained_wholes
from lora_plugins_sdk.offline.origin import origin_problems
from lora_plugins_sdk.peft_config import minimal_config
from lora_plugins_sdk.peft_files import PeftAdapter, read_adapter, write_adapter
from lora_plugins_sdk.serving.sglang import ENGINE as SGLANG
from lora_plugins_sdk.serving.sglang import for_sglang
from lora_plugins_sdk.serving.sglang_config import missing_keys, unpublished_keys
from lora_plugins_sdk.serving.sglang_import import from_sglang
from lora_plugins_sdk.staging import directory_problem, refuse_output
from lora_plugins_sdk.weight_files import read_weight_files

PEFT = "peft"
FORMS = (PEFT, SGLANG)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What an export wrote.

    Args:
        directory: the new directory.
        files: names of its tensor files.
        tensors: how many tensors they hold.
        num_bytes: size of those.
        left_out: what of the source is not in it, each with the reason.
        engine_arguments: what the engine must be started with to serve it; empty for PEFT.
        not_compared: why the factors were not compared with the base's weights; None when they were, or without a base.
        unpublished: keys that the base's config lacks for SGLang to build the same model of it (`unpublished_keys`):
            that base cannot be served, the published one can.
    """

    directory: Path
    files: tuple[str, ...]
    tensors: int
    num_bytes: int
    left_out: Mapping[str, str]
    engine_arguments: tuple[str, ...]
    not_compared: str | None
    unpublished: tuple[str, ...]


def export_files(
    source: str | Path,
    output: str | Path,
    *,
    form: str = PEFT,
    base: str | Path | None = None,
    max_shard_bytes: int | None = None,
) -> ExportReport:
    """Export an adapter directory, or the adapter of a checkpoint. The same adapter gives the same bytes.

    Args:
        source: PEFT directory, checkpoint or finished run; an export for an engine is turned back first.
        output: directory to make; appears whole or not at all.
        form: one of `FORMS`.
        base: HF directory of the base. An engine's form follows its config; left out, the directory that the adapter's
            config names is taken. Factors and whole weights in the adapter are compared with its weights, and names of
            another schema that the model's plugin knows become HF's.
        max_shard_bytes: as for `write_adapter`.

    Raises:
        LoraError: the adapter is damaged, no plain LoRA or of another base; the engine cannot serve it; an engine's
            export cannot be turned back; the output exists or cannot be written.
    """
    if form not in FORMS:
        raise LoraError(f"form {form!r}", reason="is unknown", cure=f"use one of {', '.join(FORMS)}")
    output = Path(output)
    refuse_output(output)
    directory = adapter_directory(source)
    saved = read_adapter(directory)
    turned = saved.origin is not None and saved.origin.engine == SGLANG
    given = None if base is None else Path(base)
    if given is not None and (problem := directory_problem(given)):
        raise LoraError(f"--base {given}", reason=problem, cure="give the HF directory of the base")
    base = _base(saved, given) if turned or form == SGLANG else given
    left_out: dict[str, str] = {}
    if turned:
        assert base is not None
        adapter, left_out = _back_from_sglang(plain_adapter(saved, directory), base)
    else:
        adapter = plain_adapter(saved if base is None else in_hf_names(saved, base), directory)
    not_compared = None if base is None else _not_compared(base)
    raise_if_any(f"{adapter.directory} cannot be exported:", _problems(adapter, base, comparable=not_compared is None))
    plain = {name: tensor for name, tensor in adapter.saved.tensors.items() if ".lora_" in name}
    left_out |= {name: "the base's own weight" for name in adapter.saved.tensors.keys() - plain.keys()}
    arguments: tuple[str, ...] = ()
    unpublished: list[str] = []
    if form == PEFT:
        exported = _for_peft(adapter, plain)
    else:
        assert base is not None
        hf_config = read_hf_config(base)
        served = for_sglang(plain, adapter.config, hf_config)
        left_out |= {module: "its delta is zero, and SGLang serves no LoRA there" for module in served.left_out}
        exported = PeftAdapter(
            tensors=served.tensors,
            config=served.config,
            origin=replace(adapter.saved.origin or AdapterOrigin(), engine=SGLANG),
        )
        arguments = _sglang_arguments(exported.config, output, served.shared_outer_experts, hf_config)
        unpublished = unpublished_keys(hf_config)
    write_adapter(exported, output, max_shard_bytes=max_shard_bytes)
    return ExportReport(
        directory=output,
        files=tuple(sorted(adapter_weights(output).headers)),
        tensors=len(exported.tensors),
        num_bytes=exported.num_bytes,
        left_out=dict(sorted(left_out.items())),
        engine_arguments=arguments,
        not_compared=not_compared,
        unpublished=tuple(unpublished),
    )


def _for_peft(adapter: PlainAdapter, tensors: Mapping[str, torch.Tensor]) -> PeftAdapter:
    modules = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    return PeftAdapter(tensors=tensors, config=minimal_config(adapter.config, modules), origin=adapter.saved.origin)


def _problems(adapter: PlainAdapter, base: Path | None, *, comparable: bool) -> Iterator[Diagnostic]:
    """What does not belong to the base. Whole weights that were saved along are not exported: each must be its own."""
    if base is None:
        for name in sorted(adapter.wholes):
            yield Diagnostic(
                subject=name,
                reason="is in the adapter as a whole weight, is not exported, and only the base tells if it is its own",
                cure="give the base (--base)",
            )
        return
    yield from origin_problems(adapter, base)
    if comparable:
        yield from fit(adapter, read_weight_files(base), read_hf_config(base), folding=False).problems
    elif adapter.wholes:
        yield from trained_wholes(adapter, read_weight_files(base))


def _not_compared(base: Path) -> str | None:
    """Why an adapter's factors cannot be compared with a base's weights; None when they can."""
    if config_values(read_hf_config(base), "quantization_config"):
        return f"{base} is quantised: its stored shapes say nothing"
    # For an engine, a base's config is enough.
    return None if any(base.glob("*.safetensors")) else f"{base} holds no *.safetensors file"


def _back_from_sglang(adapter: PlainAdapter, base: Path) -> tuple[PlainAdapter, dict[str, str]]:
    """The adapter in PEFT's form, and what of it is not needed there."""
    saved = adapter.saved
    assert saved.origin is not None
    found = from_sglang(saved.tensors, saved.config, read_hf_config(base), read_weight_files(base).where)
    peft = PeftAdapter(tensors=found.tensors, config=found.config, origin=replace(saved.origin, engine=None))
    return plain_adapter(peft, adapter.directory), {
        module: "its factors are zeros, as SGLang needs them beside others" for module in found.left_out
    }


def _base(adapter: PeftAdapter, base: Path | None) -> Path:
    """The base's directory, given or named by the adapter."""
    named = adapter.config.get("base_model_name_or_path")
    if base is None and isinstance(named, str) and os.path.isfile(Path(named) / "config.json"):
        base = Path(named)
    if base is None:
        raise LoraError(
            "--base",
            reason=f"is needed: the form depends on the base's config.json, and {named!r} is no directory here",
            cure="give the HF directory of the base",
        )
    return base


def _sglang_arguments(
    config: Mapping[str, Any], output: Path, shared_outer: bool | None, hf_config: Mapping[str, Any]
) -> tuple[str, ...]:
    arguments = [
        "--enable-lora",
        "--max-lora-rank",
        str(config["r"]),
        "--lora-target-modules",
        *config["target_modules"],
    ]
    if shared_outer is not None:
        arguments.append("--experts-shared-outer-loras" if shared_outer else "--no-experts-shared-outer-loras")
    if keys := missing_keys(hf_config):
        arguments += ["--json-model-override-args", json.dumps(keys)]
    return (*arguments, "--lora-paths", f"{output.name}={output}")
