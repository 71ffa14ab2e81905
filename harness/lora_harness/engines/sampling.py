"""Drawing tokens so that one request's randomness depends on its seed and the token's position only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def request_uniforms(seed: int, count: int) -> np.ndarray:
    """The first `count` uniform numbers in [0, 1) of a request, fp64, shape [count].

    Philox is keyed with all 64 bits of the seed (torch's CPU generator would keep 32), and a longer request's
    numbers start with those of a shorter one.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row, by inverting the cumulative distribution.

    The inverse is taken in fp64, so that rounding differences of the logits between batch shapes (about 1e-7)
    change a token only where a uniform number falls that close to a boundary.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows], fp64; 0 takes the most likely token (the lowest id among equals).
        uniforms: [rows], fp64, in [0, 1).

    Returns:
        Token ids [rows] and log-probabilities [rows] in fp64 under softmax(logits / temperature), temperature
        1 where greedy.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    logprobs = torch.log_softmax(logits.double() / scale[:, None], dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total: the first entry above it then exists and has a probability above zero.
    level = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = torch.searchsorted(cumulative, level, right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(dim=-1), sampled)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
