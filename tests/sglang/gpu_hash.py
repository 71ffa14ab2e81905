"""SGLang's own checksum of a GPU's weights, its Triton kernels run by Triton's interpreter. For a process of its own
with `TRITON_INTERPRET=1`."""

from __future__ import annotations

from unittest.mock import patch

import torch

SHAPES = ((1,), (3,), (8192,), (100, 33), (3 * 8192 + 5,), (513, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors() -> list[torch.Tensor]:
    """Sizes around words and tiles."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).mul(100).to(dtype) for shape in SHAPES for dtype in DTYPES]


def checksums() -> list[str]:
    """As `weight_checker` formats them. Only the question whether a tensor is on a GPU is answered by us."""
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    with patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)):
        return [f"{gpu_tensor_hash(one):016x}" for one in tensors()]
