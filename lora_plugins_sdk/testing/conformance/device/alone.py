"""A function in a process of its own that sees this machine's accelerator; test worlds hide it from their ranks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.function import FunctionReference
from lora_plugins_sdk.testing.layout import Layout, enter_layout

_PROGRAM = "from lora_plugins_sdk.testing.conformance.device.alone import main; main()"


def run_alone(function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    """`function(*arguments)` as the only rank of a run on this machine's device.

    Args:
        function: a function at the top level of a module.
        arguments: pickled.
        timeout: seconds.

    Returns:
        What the function returned, tensors on the CPU.

    Raises:
        RuntimeError: it raised, died or took too long; the message holds what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        case, result = Path(folder) / "case", Path(folder) / "result"
        case.write_bytes(pickle.dumps((FunctionReference.of(function), pickle.dumps(arguments))))
        path = os.pathsep.join(one or os.getcwd() for one in sys.path)
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROGRAM, str(case), str(result)],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = error.output or b""
            raise RuntimeError(f"{function.__name__}: not done after {timeout:g} s\n{output!s}") from None
        if done.returncode or not result.is_file():
            raise RuntimeError(f"{function.__name__}: exit code {done.returncode}\n{done.stdout}")
        return pickle.loads(result.read_bytes())


def main() -> None:
    """In the process: run the case in file 1, write what it returned to file 2."""
    import torch

    from lora_plugins_sdk.hosts.initialize import initialize_megatron
    from lora_plugins_sdk.testing.rank import SEED
    from lora_plugins_sdk.testing.transport import dump_result

    reference, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    function = reference.resolve()
    initialize_megatron(RunFacts())
    enter_layout(Layout())
    torch.manual_seed(SEED)
    Path(sys.argv[2]).write_bytes(dump_result(function(*pickle.loads(arguments))))
