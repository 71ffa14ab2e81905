"""A SGLang server as a process of this one: started, waited for, watched, and stopped with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lora_harness.engines.sglang import serve
from lora_harness.engines.sglang.log_tail import LogTail
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.staging import writable

HOST = "127.0.0.1"
_ORDERLY_SECONDS = 10.0
_POLL_SECONDS = 0.25


class SglangServer:
    """One server process, with its own interpreter. It ends with this process, however this process ends.

    Args:
        arguments: SGLang's arguments but for host and port.
        python: interpreter that has SGLang; this process's own by default.
        port: port to serve on; a free one when None.
        log: file that receives everything the server prints; its arguments are written beside it.
        label: how messages call it.
        environment: environment variables on top of this process's.

    Raises:
        LoraError: no such interpreter, port in use, or the log cannot be written.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        log: Path,
        python: Path | None = None,
        port: int | None = None,
        label: str = "sglang",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.label = label
        interpreter = str(python or sys.executable)
        settings = log.with_suffix(".json")
        self._log = LogTail(log)
        # From here on the port is the server's: nobody else can listen there, also while it loads.
        with _listen(port) as listening:
            self.port: int = listening.getsockname()[1]
            with writable(log.parent):
                served = {**arguments, "host": HOST, "port": self.port}
                settings.write_text(json.dumps(served, indent=2), encoding="utf-8")
                output = log.open("ab")
            with output:
                try:
                    # A pipe of its own as standard input: the server ends when it is closed, also by the kernel.
                    self._process = subprocess.Popen(
                        [interpreter, serve.__file__, str(settings), str(listening.fileno())],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        pass_fds=[listening.fileno()],
                        env={**os.environ, **(environment or {})},
                    )
                except OSError as error:
                    raise LoraError(
                        f"rollout.sglang.python = {interpreter!r}",
                        reason=f"cannot be started ({error.strerror})",
                        cure="give the path of a Python interpreter that has SGLang",
                    ) from None

    @property
    def log(self) -> Path:
        """Where it prints."""
        return self._log.path

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id, which is the id of its process group too."""
        return self._process.pid

    def wait_until_ready(self, answers: Callable[[], bool], *, timeout: float) -> float:
        """Wait until the server answers; returns the seconds it took.

        Args:
            answers: asks the server for its health.
            timeout: seconds.

        Raises:
            LoraError: it died, with what it said, or it took too long and was stopped.
        """
        began = time.monotonic()
        while not answers():
            self.raise_if_dead("while it started")
            if time.monotonic() - began > timeout:
                self.stop()
                raise LoraError(
                    f"{self.label} ({self._log.path})",
                    reason=f"did not answer within {timeout:g} s; the end of its log:\n{self._log.tail()}",
                    cure="raise rollout.sglang.start_timeout, or give it less to load",
                )
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    def died(self, grace: float = 0.0) -> bool:
        """Whether the process ended; `grace` seconds are given to one that is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        return self._process.poll() is not None

    def raise_if_dead(self, when: str, *, grace: float = 0.0) -> None:
        """Raise a `LoraError` with the end of the log if the server ended without being asked to."""
        if not self.died(grace):
            return
        told = self._problem()
        if told is not None:
            raise LoraError(told["subject"], reason=told["reason"], cure=told["cure"])
        raise LoraError(
            f"{self.label} ({self._log.path})",
            reason=f"ended {when} with {_exit_words(self._process.returncode)}; "
            f"the end of its log:\n{self._log.tail()}",
            cure="correct what the log names; it holds the whole story",
        )

    def stop(self) -> None:
        """End the server and everything it started. Safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            self.died(_ORDERLY_SECONDS)
        # Also after an orderly end: a child that hangs would keep the memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _problem(self) -> dict[str, str] | None:
        for line in self._log.lines():
            if line.startswith(serve.PROBLEM):
                return json.loads(line.removeprefix(serve.PROBLEM))
        return None


def _listen(port: int | None) -> socket.socket:
    """A socket that listens at `port`, or at a free one."""
    listening = socket.socket()
    # A port whose last connections linger may be taken again.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port or 0))
        listening.listen()
    except OSError as error:
        listening.close()
        raise LoraError(
            f"rollout.sglang.port = {port}",
            reason=f"cannot be served on ({error.strerror})",
            cure="choose a free port, or leave the option out for one that is found",
        ) from None
    return listening


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
