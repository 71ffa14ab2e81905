"""Tensors in groups that fit a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Fill one bucket after the other, in order; none is empty.

    Args:
        tensors: name and tensor, drawn as they are needed.
        limit: most bytes in a bucket; no tensor is larger.
    """
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        assert size <= limit, (name, size, limit)
        if bucket and held + size > limit:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor
        held += size
    if bucket:
        yield bucket
