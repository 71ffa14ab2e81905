"""The process that imports torch and megatron-core once and then forks ranks from itself, in milliseconds.

Requests come over a SOCK_SEQPACKET socket, one a packet: ``fork`` with the rank's socket and log file
attached, answered by the pid, and ``wait PID``, answered by the exit code or ``alive``. Forking is safe here
because this process never starts a thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from lora_plugins_sdk.hosts.cpu_shim import install_cpu_shim
from lora_plugins_sdk.testing.rank import serve

_EXIT_SECONDS = 5.0


def main(control: int, folder: str) -> None:
    """Answer requests on socket `control` until it closes. Ranks keep their stack dumps in `folder`."""
    requests = socket.socket(fileno=control)
    install_cpu_shim()  # imports most of megatron-core
    gc.freeze()  # what is imported by now is shared with the ranks: their collectors need not touch (copy) it
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 64, 2)
        if not message:  # the parent died: it kills this process otherwise
            shutil.rmtree(folder, ignore_errors=True)
            return
        command, _, argument = message.decode().partition(" ")
        if command == "wait":
            requests.send(_exit_code(int(argument)).encode())
            continue
        assert command == "fork" and len(descriptors) == 2, message
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become_rank(descriptors[0], descriptors[1], Path(folder))
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _become_rank(connection: int, log: int, folder: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()  # a group of its own, killed together with what it starts
        os.dup2(log, 1)
        os.dup2(log, 2)
        serve(Connection(connection), folder / f"{os.getpid()}.stack")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into the launcher's loop


def _exit_code(pid: int) -> str:
    """Wait for a rank that has closed its connection or was killed, and end its process group."""
    deadline = time.monotonic() + _EXIT_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what the rank started; only now, while the id is still taken
            return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        time.sleep(0.005)
    return "alive"
