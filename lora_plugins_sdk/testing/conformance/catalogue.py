"""Every check there is, by level. Checks of a level are imported only when asked for: level 0 needs no torch."""

from __future__ import annotations

from importlib import import_module

from lora_plugins_sdk.testing.conformance.check import Check, Level

_FAMILIES = {
    Level.STATIC: ("static.loading", "static.targets", "static.names", "static.packs", "static.tables"),
    Level.SINGLE: (
        "single.base",
        "single.no_op",
        "single.fold",
        "single.variants",
        "single.pinned",
        "single.effect",
        "single.peft_reader",
        "single.round_trip",
        "single.disable",
        "single.recompute",
        "single.dropout",
        "single.precision",
    ),
    Level.PARALLEL: ("parallel.run", "parallel.values", "parallel.gradients", "parallel.steps", "parallel.exports"),
    Level.DEVICE: ("device.cuda",),
}

NOT_COVERED = {"serving": "no check starts SGLang, so that it reads an export as PEFT does is not shown here"}
"""What a reader might take for checked and is not, with the reason; every report says it."""


def checks(level: Level) -> tuple[Check, ...]:
    """The checks of one level, in the order in which they are run."""
    modules = [import_module(f"{__package__}.{family}") for family in _FAMILIES[level]]
    return tuple(check for module in modules for check in module.CHECKS)
