"""What to train: rank, scale, targets. Torch-free."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from lora_plugins_sdk.errors import Diagnostic, raise_if_any

SCOPES = ("all", "language", "vision")
EXPERT_SHARINGS = ("none", "outer")
_MODULE_LISTS = ("target_modules", "exclude_modules", "pinned_modules")
ADAPTER_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """One adapter's hyper-parameters; every rank of a run uses the same.

    Args:
        rank: width r of the low-rank product, 1 or more.
        alpha: the delta is scaled by `alpha / rank` (Hu et al. 2021), or `alpha / sqrt(rank)` with `use_rslora`.
        dropout: probability of zeroing an entry of the branch's input while training, in [0, 1).
        use_rslora: rank-stabilised scale (Kalajdzievski 2023).
        target_modules: `all-linear`, HF names (`q_proj`), Megatron names (`linear_qkv`), full paths or wildcards.
        exclude_modules: taken away from the targets; same vocabulary.
        pinned_modules: targets that this run holds at zero, since its rollout engine cannot serve them; same
            vocabulary. They are in every adapter file, with a B of exact zeros, and nothing trains them. A run whose
            engine can serve them goes on from the same file without pins.
        scope: region of a multimodal model that may be adapted: `all`, `language` or `vision`.
        expert_sharing: `none` gives every routed expert factors of its own; `outer` has all experts of a layer share
            the factor on the hidden side: A where they read the hidden states, B where they write them.
        seed: seed of the A factors; B starts at zero.
        dtype: dtype the factors are stored in. float32 by default: the optimizer then needs no master copy, and the
            forward casts the small factors to the host's dtype, so activations stay as they were.

    Raises:
        LoraError: listing every value out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    use_rslora: bool = False
    target_modules: tuple[str, ...] = ("all-linear",)
    exclude_modules: tuple[str, ...] = ()
    pinned_modules: tuple[str, ...] = ()
    scope: str = "all"
    expert_sharing: str = "none"
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _MODULE_LISTS:
            value = getattr(self, name)
            many = isinstance(value, Iterable) and not isinstance(value, str)
            object.__setattr__(self, name, tuple(value) if many else (value,))
        raise_if_any("invalid LoRA configuration:", self._problems())

    def _problems(self) -> Iterable[Diagnostic]:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            yield Diagnostic(
                subject=f"rank={self.rank!r}", reason="not a positive integer", cure="use 1 or more, e.g. 16"
            )
        if not _is_number(self.alpha) or not 0 < self.alpha <= sys.float_info.max:
            yield Diagnostic(
                subject=f"alpha={self.alpha!r}",
                reason="the delta would vanish or change sign" if _is_number(self.alpha) else "not a number",
                cure="use a positive number, e.g. 2 * rank",
            )
        if not _is_number(self.dropout) or not 0.0 <= self.dropout < 1.0:
            yield Diagnostic(subject=f"dropout={self.dropout!r}", reason="not a probability below 1", cure="use 0.0")
        if not isinstance(self.use_rslora, bool):
            yield Diagnostic(subject=f"use_rslora={self.use_rslora!r}", reason="not a boolean", cure="use True")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            yield Diagnostic(subject=f"seed={self.seed!r}", reason="not an integer", cure="use 0")
        if not self.target_modules:
            yield Diagnostic(subject="target_modules", reason="names no module", cure="use 'all-linear'")
        for name in _MODULE_LISTS:
            for target in getattr(self, name):
                if not isinstance(target, str) or not target:
                    yield Diagnostic(subject=f"{name}: {target!r}", reason="not a module name", cure="use 'q_proj'")
        if self.scope not in SCOPES:
            yield Diagnostic(
                subject=f"scope={self.scope!r}",
                reason="unknown scope",
                cure=f"use one of {', '.join(SCOPES)}",
            )
        if self.expert_sharing not in EXPERT_SHARINGS:
            yield Diagnostic(
                subject=f"expert_sharing={self.expert_sharing!r}",
                reason="unknown sharing",
                cure=f"use one of {', '.join(EXPERT_SHARINGS)}",
            )
        if self.dtype not in ADAPTER_DTYPES:
            yield Diagnostic(
                subject=f"dtype={self.dtype!r}",
                reason="unknown dtype",
                cure=f"use one of {', '.join(ADAPTER_DTYPES)}",
            )

    @property
    def scale(self) -> float:
        """Factor on `B A x`: `alpha / rank`, or `alpha / sqrt(rank)` with rsLoRA."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
