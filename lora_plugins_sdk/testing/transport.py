"""Pickle what a rank returns so that another process can read it with torch alone."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dump_result(value: Any) -> bytes:
    """Pickle of `value` for :func:`pickle.loads`, every tensor on the CPU and detached from its graph.

    A tensor goes through :func:`torch.save`: plain pickle refers to a loader that megatron-core 0.19 replaces by
    its own, so that the reader would have to import megatron-core.
    """
    buffer = io.BytesIO()
    _ResultPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _ResultPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        buffer = io.BytesIO()
        detached = obj.detach().cpu()
        if detached.untyped_storage().nbytes() > detached.nbytes:
            detached = detached.clone()  # torch.save would write all that a view looks into
        torch.save(detached.requires_grad_(obj.requires_grad), buffer)
        return load_tensor, (buffer.getvalue(),)


def load_tensor(saved: bytes) -> torch.Tensor:
    """The tensor in the bytes of :func:`torch.save`."""
    return torch.load(io.BytesIO(saved), weights_only=True)
