"""Runs one SGLang server; started by `server.py` with the interpreter that has SGLang, as a file of its own.

That interpreter need not have the harness, so this file imports nothing of it. Four things differ from SGLang's own
launcher: the arguments come as JSON, under the names that SGLang's `Engine` takes; what is wrong with them is told in
one line that starts with `PROBLEM`; it serves on a socket that listens already, whose file descriptor it is given; and
the server ends when the process at the other end of its standard input ends, however that ended.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

PROBLEM = "lora-grpo-problem: "
_PLUGIN = "lora_sglang_cpu"


def _end_with_parent() -> None:
    """End the whole process group as soon as standard input is closed at its other end."""
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _refuse(subject: str, reason: str, cure: str) -> NoReturn:
    print(PROBLEM + json.dumps({"subject": subject, "reason": reason, "cure": cure}), flush=True)
    sys.exit(2)


def _server_args(arguments: dict[str, Any]) -> Any:
    """SGLang's `ServerArgs`; a problem with the interpreter or with a name ends the process."""
    try:
        from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        _refuse(
            f"rollout.sglang.python = {sys.executable!r}",
            f"cannot import SGLang ({error})",
            "install SGLang into that interpreter, or name one that has it",
        )
    known = [name for name in inspect.signature(ServerArgs).parameters if name != "self"]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            _refuse(
                f"rollout.sglang.arguments.{name}",
                "this SGLang has no such argument",
                f"did you mean {close[0]!r}?" if close else "see `python -m sglang.launch_server --help`",
            )
    return ServerArgs(**arguments)


def _refuse_cpu_without_plugin(arguments: dict[str, Any]) -> None:
    """SGLang from PyPI has no CPU kernels; without our plugin its first import that needs one fails obscurely."""
    from importlib.metadata import entry_points

    names = {one.name for one in entry_points(group="sglang.srt.plugins")}
    kernels = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    if arguments.get("device") == "cpu" and _PLUGIN not in names and not kernels:
        _refuse(
            f"rollout.sglang.python = {sys.executable!r}",
            "has SGLang, but neither its CPU kernels nor this project's replacement for them",
            "install lora-plugins-sdk into that interpreter as well",
        )


def _serve_on(descriptor: int) -> None:
    """Make uvicorn accept on this socket.

    Its own bind comes last, when others may have taken the port meanwhile, and then it waits for a warm-up that asks at
    that very port.
    """
    import uvicorn  # pyright: ignore[reportMissingImports]

    os.set_inheritable(descriptor, False)
    listening = socket.socket(fileno=descriptor)
    uvicorn.Server.run = functools.partialmethod(uvicorn.Server.run, sockets=[listening])


def main() -> None:
    # Python puts this file's directory first, where SGLang would find our modules in place of others of the same name.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [one for one in sys.path if one != here]
    with open(sys.argv[1], encoding="utf-8") as file:
        arguments = json.load(file)
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_with_parent, daemon=True).start()
    _refuse_cpu_without_plugin(arguments)
    server_args = _server_args(arguments)
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]

    _serve_on(int(sys.argv[2]))
    load_plugins()
    run_server(server_args)


if __name__ == "__main__":
    main()
