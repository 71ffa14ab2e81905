"""Run a function on every rank of a small gloo world: what each rank returned, or every rank's stack."""

from __future__ import annotations

import os
import pickle
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing.failure import Outcome, RankReport, WorldError, describe_exit
from lora_plugins_sdk.testing.function import FunctionReference
from lora_plugins_sdk.testing.layout import Layout
from lora_plugins_sdk.testing.messages import Case, Leave, Returned
from lora_plugins_sdk.testing.pool import rank_pool
from lora_plugins_sdk.testing.processes import RankProcess, rank_environment
from lora_plugins_sdk.testing.stacks import request_stacks

# After a first failure, how long other ranks get to report theirs: often they fail alike, or because of it.
_GRACE_SECONDS = 0.3


def run_world(
    fn: Callable[..., Any], layout: Layout, /, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on every rank of a fresh world.

    The ranks are processes that are kept for later cases. In each: megatron-core's parallel state for
    `layout` over gloo, the CPU shim, one torch thread, equal seeds, the caller's environment, working
    folder and import path. What a rank prints is printed here, each line with its rank.

    Args:
        fn: a function at the top level of a module; a test file will do.
        layout: parallel sizes.
        args, kwargs: arguments for `fn`, pickled.
        timeout: seconds that the case may take (starting new ranks does not count).

    Returns:
        Each rank's return value in rank order, tensors on the CPU.

    Raises:
        WorldError: a rank raised or died, or time ran out; it shows every rank's traceback or stack.
        LoraError: `fn` cannot be found by name, or an argument cannot be pickled.
        RuntimeError: the ranks cannot be started.
    """
    reference = FunctionReference.of(fn)
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception as error:
        raise LoraError(
            f"arguments of {reference}", reason=f"not picklable: {error}", cure="build them in the function"
        ) from error
    pool = rank_pool()
    ranks = pool.acquire(layout.world_size)
    try:
        store = ranks[0].stack_file.parent / f"{uuid.uuid4().hex}.store"
        for index, rank in enumerate(ranks):
            rank.connection.send(
                Case(
                    function=reference,
                    arguments=arguments,
                    layout=layout,
                    rank=index,
                    store=store,
                    timeout=timeout,
                    environment=rank_environment(),
                    folder=os.getcwd(),
                    import_path=sys.path,
                )
            )
        values = _collect(f"{reference} on {layout}", ranks, timeout)
        for rank in ranks:
            rank.connection.send(Leave())
    except BaseException:
        for rank in ranks:
            rank.kill()
        raise
    _print_output(ranks)
    pool.release(ranks)
    return [pickle.loads(value) for value in values]


def _collect(case: str, ranks: Sequence[RankProcess], timeout: float) -> list[bytes]:
    """Each rank's pickled value; at the first failure, or when time runs out, WorldError."""
    deadline = time.monotonic() + timeout
    returned: dict[int, bytes] = {}
    failed: dict[int, RankReport] = {}  # in order of arrival
    while len(returned) + len(failed) < len(ranks):
        waiting = {
            rank.connection: index for index, rank in enumerate(ranks) if index not in returned and index not in failed
        }
        arrived = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not arrived:
            break
        for connection in arrived:
            index = waiting[connection]  # type: ignore[index]
            answer = _receive(ranks[index], index)
            if isinstance(answer, bytes):
                returned[index] = answer
                continue
            if not failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            failed[index] = answer
    if len(returned) == len(ranks):
        return [returned[index] for index in range(len(ranks))]
    if failed:
        first = min(failed.values(), key=lambda report: report.outcome is not Outcome.DIED)
        what, blamed = f"{case}: rank {first.rank} {first.outcome.value}: {first.summary}", first.rank
    else:
        what, blamed = f"{case}: not done after {timeout:g} s", None
    raise WorldError(what, [*failed.values(), *_report_others(ranks, failed, returned)], blamed)


def _receive(rank: RankProcess, index: int) -> bytes | RankReport:
    """The value that a rank sends, or how it failed."""
    try:
        message = rank.connection.recv()
    except (EOFError, OSError):
        return RankReport(
            rank=index,
            pid=rank.pid,
            outcome=Outcome.DIED,
            summary=describe_exit(rank.exit_code()),
            stack=rank.stack_file.read_text(),
            output=rank.read_output(),
        )
    if isinstance(message, Returned):
        return message.value
    return RankReport(
        rank=index,
        pid=rank.pid,
        outcome=Outcome.RAISED,
        summary=message.summary,
        stack=message.traceback,
        output=rank.read_output(),
    )


def _report_others(
    ranks: Sequence[RankProcess], failed: dict[int, RankReport], returned: dict[int, bytes]
) -> list[RankReport]:
    running = {
        rank.pid: rank.stack_file for index, rank in enumerate(ranks) if index not in failed and index not in returned
    }
    stacks = request_stacks(running)
    return [
        RankReport(
            rank=index,
            pid=rank.pid,
            outcome=Outcome.RUNNING if rank.pid in stacks else Outcome.RETURNED,
            stack=stacks.get(rank.pid, ""),
            output=rank.read_output(),
        )
        for index, rank in enumerate(ranks)
        if index not in failed
    ]


def _print_output(ranks: Sequence[RankProcess]) -> None:
    for index, rank in enumerate(ranks):
        for line in rank.read_output().splitlines():
            print(f"[rank {index}] {line}")
