"""Where a run starts: anew, in a checkpoint, or with a checkpoint's weights alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_harness.checkpoint import (
    CheckpointDirectory,
    RunIdentity,
    RunState,
    differences,
    identify,
    read_state,
    weights_differences,
)
from lora_harness.checkpoint.state import STATE_FILE
from lora_harness.config import TrainConfig
from lora_harness.report import refuse_used_output
from lora_harness.report.summary import FILE_NAME as SUMMARY_NAME
from lora_harness.tasks import Example
from lora_harness.warm_start import other_base
from lora_plugins_sdk import RunFacts
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.staging import exclusive, writable

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a run begins.

    Args:
        checkpoint: checkpoint to read; None when nothing is read.
        state: its state; None when nothing is read.
        weights_only: take its adapter alone and begin at step 0.
        resume_at: finished steps of the run that continues in the output directory; None in a new directory.
        identity: whose checkpoints this run writes; None when it neither reads nor writes any.
    """

    checkpoint: Path | None = None
    state: RunState | None = None
    weights_only: bool = False
    resume_at: int | None = None
    identity: RunIdentity | None = None

    @property
    def resumed(self) -> RunState | None:
        """The state that the run continues from."""
        return None if self.weights_only else self.state

    @property
    def note(self) -> str | None:
        """What to tell the user."""
        if self.weights_only:
            return f"starting at step 1 with the weights of {self.checkpoint}; its optimizer is not loaded"
        if self.state is not None:
            return f"resuming after step {self.state.step} from {self.checkpoint}"
        return "no checkpoint to resume from: starting anew" if self.resume_at == 0 else None


def refuse_unnamed_weights(resume: str | None, *, weights_only: bool) -> None:
    """Refuse to take the weights alone of a checkpoint that no path names.

    Args:
        resume, weights_only: as for `choose_start`.

    Raises:
        LoraError: it is so.
    """
    if weights_only and resume in (None, AUTO):
        raise LoraError(
            "--load-weights-only", reason="begins a new run from a checkpoint", cure="name it: --resume PATH"
        )


def choose_start(
    config: TrainConfig, facts: RunFacts, prompts: Sequence[Example], *, resume: str | None, weights_only: bool
) -> Start:
    """Find the checkpoint that a run is to start from and check that it belongs to the run. Changes nothing.

    Args:
        config: the run's config.
        facts: its parallel sizes; the checkpoint may be of other sizes.
        prompts: the run's training prompts.
        resume: `auto` (the newest checkpoint of the output directory, a new run when there is none), the path of a
            checkpoint or of a run's directory (its newest checkpoint), or None (a new run).
        weights_only: take the adapter of the checkpoint at `resume` and nothing else.

    Raises:
        LoraError: nothing to resume at that path; everything in which the checkpoint differs from the run; the output
            holds another run; or the warm-start adapter belongs to another base.
    """
    refuse_unnamed_weights(resume, weights_only=weights_only)
    writes = config.checkpoint.every > 0
    if resume is None or weights_only:
        refuse_used_output(config.output)
    if config.warm_start.adapter is not None:
        raise_if_any("cannot start from this adapter:", other_base(config.warm_start.adapter, config.model.path))
    identity = identify(config, facts) if writes or resume is not None else None
    if resume is None:
        return Start(identity=identity)
    assert identity is not None
    checkpoint = CheckpointDirectory(config.output).newest() if resume == AUTO else _named(Path(resume))
    if checkpoint is None:
        _refuse_finished(config.output)
        return Start(identity=identity, resume_at=0)
    state = read_state(checkpoint)
    if weights_only:
        found = [*weights_differences(state, identity), *_two_sources(config)]
        raise_if_any(f"the weights of checkpoint {checkpoint} cannot be loaded:", found)
        return Start(checkpoint=checkpoint, state=state, weights_only=True, identity=identity)
    found = [*_misplaced(checkpoint, state, config.output), *differences(state, identity)]
    raise_if_any(f"cannot resume from checkpoint {checkpoint}:", found or _other_prompts(state, config, prompts))
    return Start(checkpoint=checkpoint, state=state, resume_at=state.step, identity=identity)


@contextmanager
def owned_output(output: Path, resume_at: int | None) -> Iterator[list[int]]:
    """Own a run's output directory: no other process may run in it. What killed processes left is removed, and so are
    the checkpoints of later steps than the run continues from, whose steps it makes again.

    Yields:
        The steps of the checkpoints that were removed.

    Raises:
        LoraError: another process runs there, or it cannot be written.
    """
    with writable(output):
        output.mkdir(parents=True, exist_ok=True)
    lock = exclusive(output / ".lock", output)
    with writable(output):
        lock.__enter__()
    try:
        checkpoints = CheckpointDirectory(output)
        checkpoints.sweep()
        yield [] if resume_at is None else checkpoints.remove_after(resume_at)
    finally:
        lock.__exit__(None, None, None)


class PromptDigest:
    """SHA-256 over the prompts and answers that a run has trained on, in order: its place in the data.

    Args:
        examples: those so far.
    """

    def __init__(self, examples: Sequence[Example] = ()) -> None:
        self._digest = hashlib.sha256()
        self.update(examples)

    def update(self, examples: Sequence[Example]) -> None:
        """Add the next ones."""
        for one in examples:
            self._digest.update(json.dumps([one.prompt, one.answer]).encode())

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()


def _named(path: Path) -> Path:
    """The checkpoint that `--resume PATH` means."""
    if (path / STATE_FILE).exists():
        return path
    newest = CheckpointDirectory(path).newest() if path.is_dir() else None
    if newest is None:
        raise LoraError(
            f"--resume {path}",
            reason="is neither a checkpoint nor the directory of a run with checkpoints"
            if path.exists()
            else "no such directory",
            cure="give RUN/checkpoints/step-N, the RUN directory, or auto",
        )
    return newest


def _other_prompts(state: RunState, config: TrainConfig, prompts: Sequence[Example]) -> Iterator[Diagnostic]:
    done = prompts[: state.step * config.algorithm.prompts_per_step]
    if PromptDigest(done).hexdigest() != state.prompts:
        yield Diagnostic(
            subject="task",
            reason=f"gives other prompts for the {state.step} finished steps than it gave then",
            cure="put back the data of the run, or start a new run from the weights alone",
        )


def _misplaced(checkpoint: Path, state: RunState, output: Path) -> Iterator[Diagnostic]:
    own = CheckpointDirectory(output).place(state.step)
    if checkpoint.resolve() != own.resolve():
        yield Diagnostic(
            subject=f"output = {str(output)!r}",
            reason=f"a run continues in its own directory; there, this checkpoint is {own}",
            cure="set output to the directory that holds checkpoints/, or add --load-weights-only for a new run",
        )


def _two_sources(config: TrainConfig) -> Iterator[Diagnostic]:
    if config.warm_start.adapter is not None:
        yield Diagnostic(
            subject="warm_start.adapter",
            reason="has no effect with --load-weights-only: the weights come from the checkpoint",
            cure="remove one of the two",
        )


def _refuse_finished(output: Path) -> None:
    if (output / SUMMARY_NAME).exists():
        raise LoraError(
            f"output = {str(output)!r}",
            reason="holds a finished run without checkpoints",
            cure="choose another directory (--set output=DIR), or remove this one",
        )
