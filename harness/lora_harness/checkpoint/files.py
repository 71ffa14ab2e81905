"""A checkpoint as files: written to a new place, made durable, published by one rename. No file is a pickle.

step-000003/adapter/               PEFT directory; PEFT, `lora-grpo eval` and warm starts read it
            optimizer.safetensors  `exp_avg.<HF name>` and `exp_avg_sq.<HF name>`, full tensors
            state.json             see `state`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_harness.checkpoint.state import CURE, STATE_FILE, RunState, StoredFile
from lora_plugins_sdk import PeftAdapter, read_adapter, write_adapter
from lora_plugins_sdk.adapter_files import CONFIG_FILE
from lora_plugins_sdk.adapter_meta import META_FILE, stored_file
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.safetensors_header import read_header
from lora_plugins_sdk.staging import staged_directory

ADAPTER = "adapter"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint in full form, as no topology shards them.

    Args:
        adapter: in PEFT's terms.
        moments: as `gather_adam_moments` gives them.
    """

    adapter: PeftAdapter
    moments: Mapping[str, Tensor]


def write_checkpoint(directory: Path, checkpoint: Checkpoint, state: RunState) -> None:
    """Write a checkpoint directory, which appears whole or not at all. One rank of a run calls this.

    Args:
        directory: must not exist.
        checkpoint: the tensors.
        state: everything else; its `files` are filled in here.

    Raises:
        LoraError: it cannot be written, or holds NaN or infinite values; nothing is left of it.
    """
    _refuse_not_finite(directory, checkpoint)
    with staged_directory(directory) as place:
        write_adapter(checkpoint.adapter, place / ADAPTER)
        moments = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.moments.items()}
        try:
            save_file(moments, place / OPTIMIZER_FILE)
        except SafetensorError as error:
            raise LoraError(
                str(directory), reason=f"cannot be written ({error})", cure="give a writable place with free space"
            ) from error
        state = state.model_copy(update={"files": {name: _record(place / name) for name in _files(place)}})
        (place / STATE_FILE).write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_checkpoint(directory: Path, state: RunState) -> Checkpoint:
    """Read the tensors of a checkpoint; every file is compared with its checksum first.

    Args:
        directory: the checkpoint.
        state: its state. Rank 0's on every rank, so that no rank can read another checkpoint under the same path.

    Raises:
        LoraError: listing every file that is missing, left over or changed.
    """
    raise_if_any(f"checkpoint {directory} is damaged:", _damage(directory, state))
    path = directory / OPTIMIZER_FILE
    read_header(path)
    try:
        moments = load_file(path)
    except (SafetensorError, OSError) as error:
        raise LoraError(str(path), reason=f"cannot be loaded ({error})", cure=CURE) from error
    return Checkpoint(adapter=read_adapter(directory / ADAPTER), moments=moments)


def _refuse_not_finite(directory: Path, checkpoint: Checkpoint) -> None:
    """A run that diverged must not push its last good checkpoints out."""
    tensors = {**checkpoint.adapter.tensors, **checkpoint.moments}
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise LoraError(
            str(directory),
            reason=f"is not written: {broken[0]}"
            + (f" and {len(broken) - 1} more tensors hold" if len(broken) > 1 else " holds")
            + " NaN or infinite values",
            cure="continue from an earlier checkpoint with a lower learning rate (--load-weights-only)",
        )


def _damage(directory: Path, state: RunState) -> Iterator[Diagnostic]:
    found = set(_files(directory))
    expected = {f"{ADAPTER}/{CONFIG_FILE}", f"{ADAPTER}/{META_FILE}", OPTIMIZER_FILE}
    for name in sorted(expected | found | state.files.keys()):
        if name not in found:
            yield Diagnostic(subject=name, reason="is missing", cure=CURE)
        elif name not in state.files:
            yield Diagnostic(subject=name, reason="is no file of the checkpoint", cure="move it elsewhere")
        elif _record(directory / name) != state.files[name]:
            yield Diagnostic(subject=name, reason="differs from what was saved", cure=CURE)


def _files(directory: Path) -> list[str]:
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if name != STATE_FILE)


def _record(path: Path) -> StoredFile:
    found = stored_file(path)
    return StoredFile(size=found.size, sha256=found.sha256)
