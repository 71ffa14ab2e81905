"""A version of the policy folded into the base, read from its files each time: a merge never sees an earlier merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.offline.adapter import plain_adapter
from lora_plugins_sdk.offline.fit import Fold, by_tensor, fit
from lora_plugins_sdk.offline.shard import read_folded
from lora_plugins_sdk.peft_files import PeftAdapter
from lora_plugins_sdk.safetensors_header import read_header
from lora_plugins_sdk.weight_files import WeightFiles, read_weight_files

if TYPE_CHECKING:
    from torch import Tensor

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedVersion:
    """One version, folded when its tensors are read.

    Args:
        version: the trainer's stamp; 0 is the base.
        base: the pristine files.
        folds: HF tensor name -> its deltas; several where it holds all experts.
        scale: factor on `B A`.
    """

    version: int
    base: WeightFiles
    folds: Mapping[str, tuple[Fold, ...]]
    scale: float

    def read(self, name: str) -> Tensor:
        """A tensor of the merged model: `W + scale * B A` added in fp32 at least, in the dtype that W is stored in.

        Raises:
            LoraError: the sum is not finite, or the file cannot be read.
        """
        header = self.base.headers[self.base.where[name]]
        return read_folded(header, name, self.folds.get(name, ()), scale=self.scale)


class Folder:
    """Makes versions out of exported adapters.

    Args:
        model_dir: HF directory of the base.
        buffer_mib: largest tensor that can be sent, in MiB.

    Raises:
        LoraError: the directory holds no readable base.
    """

    def __init__(self, model_dir: Path, buffer_mib: int) -> None:
        self.base = read_weight_files(model_dir)
        self.hf_config = read_hf_config(model_dir)
        self._buffer_mib = buffer_mib

    def pristine(self) -> FoldedVersion:
        """The base itself."""
        return FoldedVersion(version=0, base=self.base, folds={}, scale=0.0)

    def fold(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> FoldedVersion:
        """Check everything that a merge depends on. Reads no weight and sends nothing.

        Raises:
            LoraError: the adapter does not fit the base, the base changed since the run began, or a tensor is larger
                than the buffer; everything is listed.
        """
        for header in self.base.headers.values():
            if read_header(header.path) != header:
                raise LoraError(
                    str(header.path), reason="changed since the run began", cure="put the base back and resume"
                )
        own = {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}
        place = Path(f"policy version {version}")
        adapter = plain_adapter(PeftAdapter(tensors=own, config=config), place)
        found = fit(adapter, self.base, self.hf_config)
        folds = by_tensor(found.folds)
        problems = [*found.problems, *self._too_large(list(folds))]
        raise_if_any(f"{place} cannot be merged into {self.base.directory}:", problems)
        return FoldedVersion(
            version=version,
            base=self.base,
            folds=folds,
            scale=adapter.lora.scale,
        )

    def _too_large(self, names: list[str]) -> list[Diagnostic]:
        return [
            Diagnostic(
                subject=name,
                reason=f"is {-(-size // MIB)} MiB, and a bucket is {self._buffer_mib} MiB at most",
                cure=f"set sync_buffer_mib to {-(-size // MIB)} or more",
            )
            for name in names
            if (size := self.base.tensor(name).num_bytes) > self._buffer_mib * MIB
        ]
