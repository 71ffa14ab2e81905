"""``state.json``: where a run stands, whose it is, and the checksums of the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.json_files import read_json_object

STATE_FILE = "state.json"
CURE = "use another checkpoint of the run"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunIdentity(_Record):
    """What a checkpoint belongs to; no part of it depends on the topology.

    Args:
        base: `base_fingerprint` of the model directory.
        plugin: name of the model plugin.
        plugin_version: its version.
        table: `ParameterTable.logical_digest`.
        warm_start: `adapter_digest` of the adapter that training started from; None when it started from nothing.
        config: the resolved config.
    """

    base: Sha256
    plugin: str
    plugin_version: str
    table: Sha256
    warm_start: Sha256 | None
    config: dict[str, Any]


class StoredFile(_Record):
    """A file of the checkpoint: size in bytes and SHA-256."""

    size: Count
    sha256: Sha256


class RunState(_Record):
    """One checkpoint, without its tensors.

    There is no generator state: every random number of a run is a function of its seed, the training step and the place
    in that step. The learning rate is a function of the step, and the step is the place in the prompts.

    Args:
        format: version of this layout.
        step: finished training steps.
        updates: optimizer updates made, which is AdamW's own counter.
        adapter_version: stamp of the last adapter that the rollout engine got.
        adapter_published: whether that is the saved adapter.
        reward_before: mean held-out reward before training.
        seconds: wall-clock seconds so far.
        prompts: SHA-256 over the prompts and answers of the finished steps.
        identity: whose checkpoint it is.
        files: relative path -> size and checksum of every other file.
    """

    format: Literal[1]
    step: Count
    updates: Count
    adapter_version: Count
    adapter_published: bool
    reward_before: float
    seconds: float
    prompts: Sha256
    identity: RunIdentity
    files: dict[str, StoredFile]


def read_state(directory: Path) -> RunState:
    """The state of a checkpoint; its tensors are not looked at.

    Raises:
        LoraError: no such file, or not of this form.
    """
    path = directory / STATE_FILE
    found = read_json_object(path, cure=CURE)
    try:
        return RunState.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise LoraError(str(path), reason=f"is no checkpoint's state ({key}: {first['msg']})", cure=CURE) from None
