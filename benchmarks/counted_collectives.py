"""Count the bytes that go through torch.distributed's collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Name -> position of the full tensor among the arguments.
_COLLECTIVES = {
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "_all_gather_base": 0,
    "reduce_scatter_tensor": 1,
    "_reduce_scatter_base": 1,
    "broadcast": 0,
}
# These take lists of tensors or other objects; the models measured here do not call them.
_UNCOUNTED = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "batch_isend_irecv", "gather")
_MODULES = ("torch.distributed", "megatron.", "lora_plugins_sdk.")


class CountedCollectives:
    """A context that counts calls made within it.

    Modules may have bound a function when they were imported, so each name that refers to one is replaced.

    Attributes:
        bytes: bytes of the full tensors so far.
        calls: collectives so far.

    Raises:
        RuntimeError: a collective is called that cannot be counted.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.calls = 0
        self._replaced: list[tuple[Any, str, Any]] = []
        self._inside = False

    def __enter__(self) -> CountedCollectives:
        counted = {getattr(dist, name): self._counting(getattr(dist, name), at) for name, at in _COLLECTIVES.items()}
        refused = {getattr(dist, name): _refusing(name) for name in _UNCOUNTED}
        replacements: dict[Any, Any] = {**counted, **refused}
        for name, module in list(sys.modules.items()):
            if not f"{name}.".startswith(_MODULES):
                continue
            for attribute, value in list(vars(module).items()):
                if callable(value) and _hashable(value) and value in replacements:
                    self._replaced.append((module, attribute, value))
                    setattr(module, attribute, replacements[value])
        return self

    def __exit__(self, *error: object) -> None:
        for module, attribute, value in self._replaced:
            setattr(module, attribute, value)

    def _counting(self, collective: Callable[..., Any], at: int) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            # Some collectives call one another: the outermost call counts.
            if self._inside:
                return collective(*args, **kwargs)
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            self.bytes += tensors[at].numel() * tensors[at].element_size()
            self.calls += 1
            self._inside = True
            try:
                return collective(*args, **kwargs)
            finally:
                self._inside = False

        return counting


def _refusing(name: str) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch.distributed.{name} was called, and its bytes are not counted")

    return refusing


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
