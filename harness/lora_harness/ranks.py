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


def on_every_rank(work: Callable[[], T]) -> T:
    """Do something that needs no other rank on each; returns this rank's answer. Collective over all ranks.

    Raises:
        LoraError: on every rank, what the first rank that failed raised.
    """
    mine = _try(work)
    errors: list[LoraError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine if isinstance(mine, LoraError) else None)
    for error in errors:
        if error is not None:
            raise error
    return _unwrap(mine)


def _try(work: Callable[[], T]) -> T | LoraError:
    try:
        return work()
    except LoraError as error:
        return error


def _unwrap(answer: T | LoraError) -> T:
    if isinstance(answer, LoraError):
        raise answer
    return answer
