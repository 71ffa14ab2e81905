"""A process of its own for what must not share one: SGLang changes transformers where it is imported, and kills its
caller when it dies."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OwnProcess:
    """One new interpreter that runs module-level functions one after the other and keeps its module state between them.

    Arguments and results are pickled: pass paths and plain values, not tensors. If the process dies the call raises
    `BrokenProcessPool`; it never hangs.
    """

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns there; what it raises is raised here."""
        return self._pool.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        """End the process once it is idle."""
        self._pool.shutdown()

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
