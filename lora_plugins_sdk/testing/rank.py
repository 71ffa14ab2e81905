"""The inside of one rank: it serves cases, one after the other, until its parent goes away."""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from lora_plugins_sdk.hosts.initialize import initialize_megatron
from lora_plugins_sdk.testing.layout import enter_layout
from lora_plugins_sdk.testing.messages import Case, Raised, Ready, Returned
from lora_plugins_sdk.testing.stacks import serve_stacks
from lora_plugins_sdk.testing.transport import dump_result

SEED = 1234
# A process group that something keeps alive keeps its three threads too, and they wake up. Models with experts leave
# some: their dispatcher holds tensors whose graph leads back to it through DDP's hooks, which no collector can see.
MOST_THREADS = 200


def serve(connection: Connection, stack_file: Path) -> None:
    """Run the cases that arrive on `connection`. Returns when the connection closes, or when cases have left too much
    behind for the next ones."""
    threading.Thread(target=watch_parent, args=(connection.fileno(),), daemon=True).start()
    serve_stacks(stack_file)
    torch.set_num_threads(1)
    try:
        while True:
            connection.send(Ready())
            connection.send(_run(connection.recv()))
            # A rank that is done keeps its groups until all are done: a slower peer may still need them.
            connection.recv()
            _leave_world()
            if len(os.listdir("/proc/self/task")) > MOST_THREADS:
                return
    except (EOFError, ConnectionError):
        return


def watch_parent(descriptor: int) -> None:
    """Kill this rank, and what it started, as soon as the other end of the socket `descriptor` is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are reported always; the main thread does the reading
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _run(case: Case) -> Returned | Raised:
    try:
        os.environ.clear()
        os.environ.update(case.environment)
        os.chdir(case.folder)
        sys.path[:] = case.import_path
        function = case.function.resolve()
        args, kwargs = pickle.loads(case.arguments)
        _enter_world(case)
        return Returned(value=dump_result(function(*args, **kwargs)))
    except BaseException as error:  # pytest's Skipped and SystemExit too: nothing a rank does may pass for success
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return Raised(
            summary="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)),
        )


def _enter_world(case: Case) -> None:
    dist.init_process_group(
        "gloo",
        init_method=case.store.as_uri(),
        rank=case.rank,
        world_size=case.layout.world_size,
        timeout=timedelta(seconds=case.timeout + 60),  # the parent's timeout comes first: it can show the stacks
    )
    initialize_megatron(case.layout)
    enter_layout(case.layout)
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _leave_world() -> None:
    """Undo what a case commonly leaves behind, so that the next one starts as in a fresh process."""
    from megatron.core import num_microbatches_calculator, parallel_state

    enter_layout(None)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    gc.collect()
