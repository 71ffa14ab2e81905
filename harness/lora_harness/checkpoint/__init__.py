"""Checkpoints of a run: the adapter, its optimizer and where the run stands; never the base."""

from lora_harness.checkpoint.directory import CheckpointDirectory
from lora_harness.checkpoint.files import Checkpoint, read_checkpoint, write_checkpoint
from lora_harness.checkpoint.identity import RunIdentity, differences, identify, weights_differences
from lora_harness.checkpoint.state import RunState, read_state

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "RunIdentity",
    "RunState",
    "differences",
    "identify",
    "read_checkpoint",
    "read_state",
    "weights_differences",
    "write_checkpoint",
]
