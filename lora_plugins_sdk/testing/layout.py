"""The parallel layout of a test world, and the layout the calling rank is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.run import RunFacts

if TYPE_CHECKING:
    from lora_plugins_sdk.parallel_run import ParallelRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(RunFacts):
    """Run facts that a world of test ranks is started with, e.g. ``Layout(tp=2, sequence_parallel=True)``.

    ``str(layout)`` is its name and suits ``pytest.mark.parametrize(..., ids=str)``.
    """

    @property
    def name(self) -> str:
        """Sizes above 1, as in ``tp2xpp2+sp`` and ``tp2+vocab128``, and ``etp`` where it is not ``tp``; ``single`` for
        one rank."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        usual = {"etp": self.tp}
        name = "x".join(f"{key}{size}" for key, size in sizes.items() if size != usual.get(key, 1)) or "single"
        padded = self.make_vocab_size_divisible_by
        return name + "+sp" * self.sequence_parallel + (f"+vocab{padded}" if padded > 1 else "")

    def __str__(self) -> str:
        return self.name

    def run(self) -> ParallelRun:
        """This rank's place in the world: sizes, ranks and live groups from megatron-core.

        Raises:
            LoraError: called outside a rank of :func:`run_world`, or on a layout the rank is not in.
        """
        if self != current_layout():
            raise LoraError(str(self), reason=f"this rank runs in layout {current_layout()}", cure="use current_run()")
        from lora_plugins_sdk.parallel_run import ParallelRun

        return ParallelRun.from_megatron(
            sequence_parallel=self.sequence_parallel, make_vocab_size_divisible_by=self.make_vocab_size_divisible_by
        )


_current: Layout | None = None


def enter_layout(layout: Layout | None) -> None:
    """Record the layout that this process' parallel state was built for (None: there is none)."""
    global _current
    _current = layout


def current_layout() -> Layout:
    """The layout of the world that the calling rank belongs to.

    Raises:
        LoraError: the caller is not a rank of :func:`run_world`.
    """
    if _current is None:
        raise LoraError(
            "current_layout()",
            reason="this process is not a rank of a test world",
            cure="call it in a function that run_world() runs",
        )
    return _current


def current_run() -> ParallelRun:
    """The calling rank's place in its world; same as ``current_layout().run()``."""
    return current_layout().run()
