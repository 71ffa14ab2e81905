"""Seeds of requests: SGLang keeps them in its deterministic mode only, which no attention backend of a CPU has.

With these hooks a request with a `sampling_seed` draws the same tokens in any batch of requests that are sampled
alike, up to the rounding of logits (about 1e-7) where a random number falls that close to a boundary. Beside greedy
requests, or requests with top-k, top-p or min-p, SGLang sorts the tokens first, which draws others. A request without
a seed draws at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lora_sglang_cpu.hook import Hook

_SEED_BITS = 63


def keep_seeds(make: Callable[..., Any], cls: type, batch: Any, vocab_size: int) -> Any:
    """Stand-in for `SamplingBatchInfo.from_schedule_batch`: SGLang's own, with the seeds of the batch's requests."""
    info = make(cls, batch, vocab_size)
    if info.sampling_seed is None:
        given = [request.sampling_params.sampling_seed for request in batch.reqs]
        seeds = [random.getrandbits(_SEED_BITS) if seed is None else seed for seed in given]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


def draw_with_seeds(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Stand-in for `multinomial_with_seed`: one number per seed and position, through the inverse of the cumulative
    distribution.

    Args:
        logprobs: `[rows, vocabulary]`, `-inf` where a token cannot be drawn.
        seed: `[rows]`, 0 or more.
        positions: `[rows]`.

    Returns:
        Column of each row, `[rows, 1]`.
    """
    keys = zip(seed.tolist(), positions.tolist(), strict=True)
    uniforms = [np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64))).random() for key in keys]
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total: the first entry above it exists then and has a probability above zero.
    level = torch.tensor(uniforms, dtype=torch.float64)[:, None] * total
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True)


HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        signature="(batch, vocab_size)",
        reason="the seed of a request is dropped without a word",
        stand_in=keep_seeds,
        around=True,
    ),
    Hook(
        target="sglang.srt.layers.sampler.multinomial_with_seed",
        signature="(logprobs, seed, positions)",
        reason="its hash is a kernel of a package that PyPI has not for the CPU",
        stand_in=draw_with_seeds,
    ),
)
