"""Rows of one rank between its projections' slabs and the host's interleaving of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_plugins_sdk.block_layout import BlockLayout


class HostOrder:
    """Where the host has one projection's local rows.

    Args:
        layout: of the full host weight.
        projection: index of the projection.
        tp: number of ranks that share the rows.
    """

    def __init__(self, layout: BlockLayout, projection: int, tp: int) -> None:
        self.blocks = layout.blocks // tp
        self.spans = layout.spans(projection)
        ranges = layout.local_order(projection, tp)
        self._order = None if len(ranges) == 1 else torch.cat([torch.arange(a, a + rows) for a, rows in ranges])

    def to_host(self, local: torch.Tensor) -> torch.Tensor:
        """Rows `[n, ...]` in the order of the slabs as `[blocks, n / blocks, ...]` in the order of the host, all spans
        of a block one after the other. A view where the orders are one.
        """
        if self._order is not None:
            local = local.index_select(0, self._on(local.device))
        return local.view(self.blocks, -1, *local.shape[1:])

    def from_host(self, host: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_host`."""
        flat = host.reshape(-1, *host.shape[2:])
        return flat if self._order is None else torch.empty_like(flat).index_copy_(0, self._on(flat.device), flat)

    def _on(self, device: torch.device) -> torch.Tensor:
        assert self._order is not None, "asked only where the orders differ"
        if self._order.device != device:
            self._order = self._order.to(device)
        return self._order


def interleave(layout: BlockLayout, tp: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One rank's host tensor from its rows of every projection.

    Args:
        layout: of the full host tensor.
        tp: number of ranks that share it.
        parts: per projection, the rank's slabs one after the other, host padding included.
    """
    blocks = layout.blocks // tp
    host = parts[0].new_empty(blocks, layout.block_rows, *parts[0].shape[1:])
    for projection, part in enumerate(parts):
        order = HostOrder(layout, projection, tp)
        rows, at = order.to_host(part), 0
        for start, count in order.spans:
            host[:, start : start + count] = rows[:, at : at + count]
            at += count
    return host.flatten(0, 1)
