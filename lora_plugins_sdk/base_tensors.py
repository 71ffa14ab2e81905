"""What a base checkpoint is to its readers, named tensors, read part by part; and a small one in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class BaseTensors(Protocol):
    """The tensors of a checkpoint: those of its files (`HfTensors`), or a plugin's view of them."""

    def names(self) -> set[str]:
        """Every tensor name."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a tensor."""
        ...

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Columns `[start, stop)` of a matrix."""
        ...

    def part(self, name: str, *index: int | slice) -> Tensor:
        """What an index over the leading dimensions selects of a tensor."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseCheckpoint:
    """A base that is small enough to hold.

    Args:
        config: `config.json`.
        tensors: HF name -> tensor.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
