"""Kill a merge with SIGKILL at every point where it touches the disk, and look at what is left. Run as a script.

A child process is forked for each point: it counts the audit events of file operations and the writes, and kills itself
at one of them. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from offline_files import fingerprint, make_adapter, make_base

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.offline import shard
from lora_plugins_sdk.offline.merge import merge, plan_merge

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.chmod", "os.utime", "fcntl.flock")
NEVER = sys.maxsize


class Points:
    """Counts points; at number `fatal` the process dies."""

    def __init__(self, fatal: int, place: Path) -> None:
        self.fatal, self.seen, self.place, self.lock = fatal, 0, str(place), threading.Lock()

    def touch(self, *_: object) -> None:
        """One more point."""
        with self.lock:
            self.seen += 1
            if self.seen == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """A point for each file operation below the place, and for each lock."""
        if event in EVENTS and (event == "fcntl.flock" or self.place in str(arguments[0])):
            self.touch()

    def around(self, plain: Callable[..., None]) -> Callable[..., None]:
        """A point before and after each call."""

        def counted(*arguments: object) -> None:
            self.touch()
            plain(*arguments)
            self.touch()

        return counted


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Run in a forked child; its exit status as `os.wait` gives it, and what it returned."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(work()).encode())
            os._exit(0)
        except LoraError as error:
            os.write(write, str(error).encode())
            os._exit(2)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    return os.waitpid(child, 0)[1], text


def merge_until(place: Path, fatal: int) -> int:
    """Merge, dying at point `fatal`; the number of points when it did not die."""
    points = Points(fatal, place)
    sys.addaudithook(points.audit)
    shard._write = points.around(shard._write)
    shard._copy = points.around(shard._copy)
    os.fsync = points.around(os.fsync)
    merge(plan_merge(place / "base", place / "adapter", place / "merged"))
    return points.seen


def merge_with_little_room(place: Path, size: int) -> None:
    """Merge where no file may grow beyond `size` bytes: the disk refuses in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    merge(plan_merge(place / "base", place / "adapter", place / "merged"))


def remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


def main(place: Path) -> None:
    torch.set_num_threads(1)
    make_base(place / "base", shards=2)
    make_adapter(place / "adapter")
    inputs = fingerprint(place)
    status, text = in_child(lambda: merge_until(place, NEVER))
    assert status == 0, text
    whole, points = fingerprint(place / "merged"), int(text)
    remove(place / "merged")
    found = {"points": points, "published": 0, "remains": 0, "faults": []}
    for fatal in range(1, points + 1):
        status, _ = in_child(lambda fatal=fatal: merge_until(place, fatal))
        names = sorted(os.listdir(place))
        complete = "merged" in names and fingerprint(place / "merged") == whole
        if os.WTERMSIG(status) != signal.SIGKILL:
            found["faults"].append(f"point {fatal}: the child was not killed")
        if [name for name in names if not name.startswith(".")] != ["adapter", "base", *["merged"] * complete]:
            found["faults"].append(f"point {fatal}: {names}")
        found["published"] += complete
        found["remains"] += any(name.startswith(".") for name in names)
        if complete:
            remove(place / "merged")
        status, text = in_child(lambda: merge_until(place, NEVER))
        if status or fingerprint(place / "merged") != whole:
            found["faults"].append(f"point {fatal}: the next merge failed: {text}")
        remove(place / "merged")
        if fingerprint(place) != inputs:
            found["faults"].append(f"point {fatal}: left {sorted(fingerprint(place).keys() - inputs.keys())}")
    status, found["full_disk"] = in_child(lambda: merge_with_little_room(place, 1000))
    if os.waitstatus_to_exitcode(status) != 2 or fingerprint(place) != inputs:
        found["faults"].append(f"full disk: status {status}, {sorted(os.listdir(place))}")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
