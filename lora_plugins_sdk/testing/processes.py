"""The parent's handles: on the launcher, and on each rank that it forked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lora_plugins_sdk.testing.messages import Ready

# What torchrun sets for the parent's own world: a rank that saw it would take it for its own.
_TORCHRUN = {
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
}
_IMPORT_SECONDS = 180.0
_OWN = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # a gloo world lives on the CPU
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",  # no name look-up, no firewall
}


def rank_environment() -> dict[str, str]:
    """The parent's environment as its ranks see it."""
    kept = {
        key: value for key, value in os.environ.items() if key not in _TORCHRUN and not key.startswith("TORCHELASTIC_")
    }
    return kept | _OWN


class Launcher:
    """A running launcher process and the folder that holds its ranks' logs, stacks and stores."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lora-world-")
        self.folder = Path(self._folder.name)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_IMPORT_SECONDS)
        arguments = f"{theirs.fileno()}, {self._folder.name!r}"
        program = f"from lora_plugins_sdk.testing.launcher import main; main({arguments})"
        self.log = self.folder / "launcher.log"
        with theirs, self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", program],
                pass_fds=[theirs.fileno()],
                env=rank_environment() | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether it can fork more ranks."""
        return self._process.poll() is None

    def fork(self, connection: int, log: int) -> int:
        """Fork a rank that talks over socket `connection` and writes to file `log`; returns its pid.

        Raises:
            RuntimeError: the launcher could not import megatron-core, or was killed.
        """
        answer = self._ask("fork", connection, log)
        if not answer:
            raise RuntimeError(f"the process that starts test ranks failed:\n{self.log.read_text()}")
        return int(answer)

    def exit_code(self, pid: int) -> int | None:
        """Exit code of the ended rank `pid` (negative: signal), or None if unknown."""
        answer = self._ask(f"wait {pid}")
        return int(answer) if answer and answer != "alive" else None

    def _ask(self, message: str, *descriptors: int) -> str:
        """The answer; empty if the launcher is dead or does not answer, and then it is killed."""
        answer = b""
        try:
            socket.send_fds(self._control, [message.encode()], list(descriptors))
            answer = self._control.recv(64)
        except OSError:
            pass
        finally:
            if not answer:  # also when interrupted: a late answer would be taken for the next question's
                self._process.kill()
                self._process.wait()
        return answer.decode()

    def close(self) -> None:
        """End the launcher; its ranks must have been killed."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


class RankProcess:
    """One rank's process. `connection` carries the messages of :mod:`lora_plugins_sdk.testing.rank`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        ours, theirs = socket.socketpair()
        descriptor, name = tempfile.mkstemp(suffix=".log", dir=launcher.folder)
        self._log, self._read = Path(name), 0
        with theirs:
            self.pid = launcher.fork(theirs.fileno(), descriptor)
        os.close(descriptor)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self._exit_code: int | None = None
        self.stack_file = launcher.folder / f"{self.pid}.stack"

    def is_ready(self, timeout: float) -> bool:
        """Wait until the rank is ready for a case; whether it is within `timeout` seconds."""
        try:
            return self.connection.poll(timeout) and isinstance(self.connection.recv(), Ready)
        except (EOFError, OSError):
            return False

    def read_output(self) -> str:
        """What the rank wrote to stdout and stderr since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        self._read += len(text)
        return text.decode(errors="replace")

    def exit_code(self) -> int | None:
        """Exit code once the rank has closed its connection (negative: signal), or None if it lives on."""
        if self._exit_code is None:
            self._exit_code = self._launcher.exit_code(self.pid)
        return self._exit_code

    def kill(self) -> None:
        """Kill the rank and what it started; no error if it is dead already."""
        if self._exit_code is None:  # its id belongs to it until it was asked for its exit code
            for kill in (os.killpg, os.kill):  # the group exists only once the rank has called setsid
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self.exit_code()
        self.connection.close()
        self._log.unlink(missing_ok=True)
        self.stack_file.unlink(missing_ok=True)
