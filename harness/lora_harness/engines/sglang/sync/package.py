"""One version of the policy as SGLang takes it: translated, checked against the base, a checksum for each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_harness.engines.sglang.sync.accepted import Factors, accepted_factors
from lora_harness.engines.sglang.sync.base_shapes import BaseShapes
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.serving.sglang import for_sglang
from lora_plugins_sdk.serving.sglang_places import OUTSIDE
from lora_plugins_sdk.weight_files import read_weight_files

if TYPE_CHECKING:
    from torch import Tensor

_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """What every engine was started with.

    Args:
        targets: SGLang's normalised module names (`lora_target_modules`).
        max_rank: largest rank (`max_lora_rank`).
        slots: adapters of one batch, the base among them (`max_loras_per_batch`).
        shared_outer_experts: `experts_shared_outer_loras`.
    """

    targets: frozenset[str]
    max_rank: int
    slots: int
    shared_outer_experts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPackage:
    """A checked adapter of one version.

    Args:
        version: the trainer's stamp, 1 or more.
        tensors: SGLang's name -> factor, on the CPU; memory of its own.
        config: `adapter_config.json` with normalised target modules.
        checksums: tensor name -> sha256 of its bytes, in hex.
    """

    version: int
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    checksums: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its name on the engines."""
        return policy_name(self.version)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(one.numel() * one.element_size() for one in self.tensors.values())


def policy_name(version: int) -> str:
    """Name of a version's adapter on the engines."""
    return f"{POLICY_PREFIX}{version}"


POLICY_PREFIX = "policy-v"


class Packer:
    """Turns exported adapters into packages.

    Args:
        model_dir: HF directory of the base that the engines serve.
        lora: what the engines were started with.

    Raises:
        LoraError: the directory holds no readable base.
    """

    def __init__(self, model_dir: Path, lora: LoraSettings) -> None:
        self._hf_config = read_hf_config(model_dir)
        text = self._hf_config.get("text_config")
        self._text_config = text if isinstance(text, Mapping) else self._hf_config
        self._base = BaseShapes.of(read_weight_files(model_dir))
        self._lora = lora
        self._names: frozenset[str] | None = None

    def pack(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> AdapterPackage:
        """Check an adapter against what the engines will really use. Sends nothing.

        Args:
            version: the trainer's stamp.
            tensors: PEFT tensor name -> full factor.
            config: `adapter_config.json`.

        Raises:
            LoraError: SGLang has no place for a tensor, would leave one out, or would copy it into another shape; one
                holds NaN or infinity; the rank, a target or the experts' layout is not what the engines were started
                for; or the set of tensors is not that of the first package. Everything is listed.
        """
        served = for_sglang(tensors, config, self._hf_config)
        problems = [
            *self._settings(served.config, served.shared_outer_experts),
            *self._misfits(served.tensors, int(served.config["r"])),
            *self._changed_set(frozenset(served.tensors)),
        ]
        raise_if_any(f"policy version {version} cannot be served ({len(served.tensors)} tensors):", problems)
        self._names = frozenset(served.tensors)
        # Of its own: a restarted engine gets this again when the trainer's tensors have moved on.
        own = {name: one.detach().to("cpu", copy=True).contiguous() for name, one in served.tensors.items()}
        return AdapterPackage(
            version=version,
            tensors=own,
            config=dict(served.config),
            checksums={name: sha256(one) for name, one in own.items()},
        )

    def _settings(self, config: Mapping[str, Any], shared_outer: bool | None) -> Iterator[Diagnostic]:
        if int(config["r"]) > self._lora.max_rank:
            yield Diagnostic(
                subject=f"r={config['r']}",
                reason=f"the engines take ranks up to {self._lora.max_rank}",
                cure=f"start them with max_lora_rank={config['r']}",
            )
        targets = set(config["target_modules"])
        for target in sorted(targets - self._lora.targets):
            yield Diagnostic(
                subject=target,
                reason=f"the engines were started for {', '.join(sorted(self._lora.targets))}",
                cure="start them with this target too",
            )
        for leaf in OUTSIDE:
            # SGLang clears these slots together: one of two keeps what an earlier adapter left there.
            if leaf in self._lora.targets - targets and targets & set(OUTSIDE):
                yield Diagnostic(
                    subject=leaf,
                    reason="the engines were started for it, and would keep what an earlier adapter had there",
                    cure="start the engines for the adapter's own targets",
                )
        if shared_outer is not None and shared_outer != self._lora.shared_outer_experts:
            yield Diagnostic(
                subject="experts",
                reason=f"share their outer factors: {shared_outer}; the engines were started for "
                f"{self._lora.shared_outer_experts} and would answer wrongly without an error",
                cure="start them with experts_shared_outer_loras as the adapter is",
            )

    def _misfits(self, tensors: Mapping[str, Tensor], rank: int) -> Iterator[Diagnostic]:
        for name, tensor in tensors.items():
            module, factor = _split(name)
            place = accepted_factors(
                module,
                self._base,
                self._text_config,
                rank=rank,
                shared_outer=self._lora.shared_outer_experts,
            )
            if not isinstance(place, Factors):
                yield Diagnostic(subject=name, reason=place, cure="train without this module")
                continue
            wanted = place.a if factor.endswith("A") else place.b
            if tuple(tensor.shape) != wanted:
                yield Diagnostic(
                    subject=name,
                    reason=f"has shape {list(tensor.shape)}, the engine copies it into {list(wanted)} ({place.form})",
                    cure="export the adapter for the base that the engines serve",
                )
            elif not tensor.is_floating_point():
                yield Diagnostic(subject=name, reason=f"has dtype {tensor.dtype}", cure="export floating point factors")
            elif not bool(torch.isfinite(tensor).all()):
                yield Diagnostic(
                    subject=name,
                    reason="holds NaN or infinite values",
                    cure="go back to an earlier checkpoint and lower the learning rate",
                )

    def _changed_set(self, names: frozenset[str]) -> Iterator[Diagnostic]:
        if self._names is None:
            return
        for name in sorted(self._names - names):
            yield Diagnostic(
                subject=name, reason="was in the version before and is missing now", cure="export the whole adapter"
            )
        for name in sorted(names - self._names):
            yield Diagnostic(
                subject=name, reason="was not in the version before", cure="keep the targets of a run as they are"
            )


def sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hex."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _split(name: str) -> tuple[str, str]:
    """Module and factor of an SGLang tensor name."""
    module, _, factor = name.removesuffix(".weight").rpartition(".")
    assert factor in _FACTORS, name
    return module, factor
