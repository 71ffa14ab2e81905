"""Faults that the kit's own tests put around a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def death() -> Iterator[None]:
    """Rank 1 dies before its first collective."""
    if dist.get_rank() == 1:
        os._exit(3)
    yield


@contextmanager
def no_model() -> Iterator[None]:
    """The plugin's model cannot be built."""
    from lora_plugins_sdk.errors import Diagnostic, LoraError
    from lora_plugins_sdk.manager import SelectedPlugin

    def refuse(*arguments: object, **options: object) -> None:
        problems = [
            Diagnostic(subject=name, reason="odd", cure="use an even one") for name in ("hidden_size", "head_dim")
        ]
        raise LoraError.from_diagnostics("cannot build:", problems)

    with patch.object(SelectedPlugin, "build_model", refuse):
        yield


@contextmanager
def stuck_reduction() -> Iterator[None]:
    """Rank 1 never reaches the gradient sums that its peer waits for."""
    from lora_plugins_sdk import reduce

    sum_coalesced = reduce._sum_coalesced

    def wait_on_rank_1(*arguments: object) -> None:
        if dist.get_rank() == 1:
            time.sleep(3600)
        sum_coalesced(*arguments)  # type: ignore[arg-type]

    with patch.object(reduce, "_sum_coalesced", wait_on_rank_1):
        yield
