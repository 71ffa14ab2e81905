"""Errors that one rank meets, raised on every rank: the others would wait for it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lora_plugins_sdk.errors import LoraError

T = TypeVar("T")


def is_alone() -> bool:
    """Whether this process is the only rank, also where no ranks were started."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, also where no ranks were started."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(work: Callable[[], T]) -> T:
    """Do something on rank 0; every rank gets its answer. Collective over all ranks.

    Raises:
        LoraError: on every rank, what `work` raised.
    """
    if is_alone():
        return work()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        answer = [_try(work)]
    dist.broadcast_object_list(answer, src=0)
    return _unwrap(answer[0])


def from_every_rank(work: Callable[[], T]) -> list[T]:
    """Do something on each rank; every rank gets all answers, in the order of ranks. Collective over all ranks.

    Args:
        work: its answer can be pickled. It needs no other rank, or fails on all ranks if on one.

    Raises:
        LoraError: on every rank, what the first rank that failed raised.
    """
    if is_alone():
        return [work()]
    answers: list[Any] = [None] * dist.get_world_size()
    # Raised after the exchange: ranks that succeeded would wait for this one otherwise.
    dist.all_gather_object(answers, _try(work))
    return [_unwrap(one) for one in answers]


def on_every_rank(work: Callable[[], T]) -> T:
    """As `from_every_rank`, but each rank gets its own answer alone, which may be anything."""
    mine: list[T] = []
    from_every_rank(lambda: mine.append(work()))
    return mine[0]


def _try(work: Callable[[], T]) -> T | LoraError:
    try:
        return work()
    except LoraError as error:
        return error


def _unwrap(answer: T | LoraError) -> T:
    if isinstance(answer, LoraError):
        raise answer
    return answer
