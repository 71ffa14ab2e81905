"""Kill whole training runs with SIGKILL while they save, prune and export; resume each; compare with a run that lived.

    python tests/harness/killed_training.py DIRECTORY --points 20 --seed 1

A child process is forked for each run, so that torch is imported once. It is `lora-grpo train CONFIG --resume auto`
from start to end; it counts its own file operations below the run's directory and kills itself at one of them, drawn
at random. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from checkpointed_run import raw_config, write_model

from lora_harness.checkpoint import CheckpointDirectory, read_checkpoint, read_state
from lora_harness.config import dump_config, parse_config
from lora_plugins_sdk import read_adapter

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")
PHASES = ("save", "prune", "export")
STEPS = 4


def phase_of(path: str) -> str | None:
    """What an operation on a path belongs to."""
    if "/checkpoints/" in path:
        return "prune" if ".removed" in path else "save"
    return "export" if "/.adapter." in path or "/adapter/" in path or path.endswith("/adapter") else None


class Points:
    """Counts file operations of each phase; dies at one of them.

    Args:
        output: the run's directory.
        fatal: phase and number of the operation; None to live.
        log: written to at the end, how many there were.
    """

    def __init__(self, output: Path, fatal: tuple[str, int] | None, log: Path) -> None:
        self.output, self.fatal, self.log, self.seen = str(output), fatal, log, Counter()
        self.removing = ""

    def install(self) -> None:
        """Watch this process."""
        sys.addaudithook(self.audit)
        os.fsync = self.around(os.fsync, lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
        safetensors.torch.save_file = self.around(safetensors.torch.save_file, lambda tensors, path, **_: str(path))
        for name in ("lora_harness.checkpoint.files", "lora_plugins_sdk.peft_files"):
            sys.modules[name].save_file = safetensors.torch.save_file  # type: ignore[attr-defined]

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """A point for each file operation below the directory."""
        if event == "shutil.rmtree":
            self.removing = str(arguments[0])
        if event in EVENTS:
            # Within a tree that is removed, names are relative to its folders.
            path = str(arguments[0])
            self.touch(path if path.startswith("/") else f"{self.removing}/{path}")

    def around(self, plain: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
        """A point before and after each call."""

        def counted(*arguments: Any, **named: Any) -> Any:
            self.touch(path_of(*arguments, **named))
            plain(*arguments, **named)
            self.touch(path_of(*arguments, **named))

        return counted

    def touch(self, path: str) -> None:
        """One more point."""
        phase = phase_of(path) if path.startswith(self.output) else None
        if phase is not None:
            self.seen[phase] += 1
            if self.fatal == (phase, self.seen[phase]):
                os.kill(os.getpid(), signal.SIGKILL)


def run(config: Path, output: Path, log: Path, fatal: tuple[str, int] | None) -> int:
    """A whole `lora-grpo train` in a forked child; its exit status as `os.waitpid` gives it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            from lora_harness.cli import app

            points = Points(output, fatal, log)
            points.install()
            app(["train", str(config), "--resume", "auto"], standalone_mode=False, obj={})
            log.with_suffix(".points").write_text(json.dumps(points.seen))
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)


def content(output: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors and the exported adapter, byte for byte."""
    files = [*(output / "adapter").rglob("*"), *(output / "checkpoints" / f"step-{STEPS:06d}").rglob("*")]
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in files
        if path.is_file() and path.name != "state.json"
    }


def faults_of_remains(output: Path) -> list[str]:
    """Whatever a killed run left under a name that counts must be whole."""
    faults: list[str] = []
    checkpoints = CheckpointDirectory(output)
    for step in checkpoints.steps():
        path = checkpoints.place(step)
        state = read_state(path)
        if state.step != step:
            faults.append(f"{path.name} says step {state.step}")
        read_checkpoint(path, state)
    if (output / "adapter").exists():
        read_adapter(output / "adapter")
    return faults


def listing(output: Path) -> set[str]:
    """Names in the run's directory, but for tensorboard's, which bear times."""
    return {str(path.relative_to(output)) for path in output.rglob("*") if "tensorboard/" not in str(path)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    place: Path = asked.directory.resolve()
    torch.set_num_threads(1)
    model = write_model(place / "model", layers=1)

    def config_for(name: str) -> tuple[Path, Path]:
        output, file = place / name / "run", place / f"{name}.toml"
        raw = raw_config(model, output) | {"steps": STEPS, "checkpoint": {"every": 1, "keep": 2}}
        file.write_text(dump_config(parse_config(raw | {"eval": {"count": 2}})))
        return file, output

    import lora_harness.train  # noqa: F401  (once, before the forks)

    file, lived = config_for("lived")
    status = run(file, lived, place / "lived.log", None)
    assert status == 0, (place / "lived.log").read_text()
    expected, names = content(lived), listing(lived)
    counts = json.loads((place / "lived.points").read_text())
    chance = random.Random(asked.seed)
    found: dict[str, Any] = {"operations": counts, "points": [], "faults": []}
    for number in range(asked.points):
        phase = PHASES[number % len(PHASES)]
        # The first of the exports dies when the adapter is there and the run has not ended.
        fatal = (phase, counts[phase] if number == 2 else chance.randint(1, counts[phase]))
        file, output = config_for(f"killed-{number}")
        label = f"{phase} operation {fatal[1]} of {counts[phase]}"
        status = run(file, output, place / f"killed-{number}.log", fatal)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            found["faults"].append(f"{label}: was not killed (status {status})")
        try:
            left = CheckpointDirectory(output).steps()
            found["faults"] += [f"{label}: {fault}" for fault in faults_of_remains(output)]
            status = run(file, output, place / f"resumed-{number}.log", None)
            if status:
                found["faults"].append(
                    f"{label}: cannot resume: {(place / f'resumed-{number}.log').read_text()[-600:]}"
                )
            elif content(output) != expected:
                found["faults"].append(f"{label}: another adapter, optimizer or meta file")
            elif listing(output) != names:
                found["faults"].append(f"{label}: left {sorted(listing(output) ^ names)}")
            found["points"].append([phase, fatal[1], left])
        except Exception as error:
            found["faults"].append(f"{label}: {type(error).__name__}: {error}")
        shutil.rmtree(output.parent, ignore_errors=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
