"""Errors that a user can act on: each names the thing, the reason and the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 20
"""Diagnostics in one error's message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """One problem found by a validation pass.

    Args:
        subject: what is wrong, named as the user wrote it (a key, a tensor, a target, a file).
        reason: why it cannot be accepted.
        cure: what the user can do about it.
    """

    subject: str
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason} -> {self.cure}"


class LoraError(ValueError):
    """A user error. ``str(error)`` holds subject, reason and cure.

    Args:
        subject: what is wrong, named as the user wrote it.
        reason: why it cannot be accepted.
        cure: the way out.
    """

    def __init__(self, subject: str, *, reason: str = "", cure: str = "") -> None:
        # megatron-core's build_module raises what it caught anew, as `type(error)(message)`: that keeps what it said.
        caught = sys.exception()
        if not reason and isinstance(caught, LoraError):
            self.diagnostics: tuple[Diagnostic, ...] = caught.diagnostics
            super().__init__(subject)
            return
        assert reason and cure, "an error says why, and what to do"
        self.diagnostics = (Diagnostic(subject=subject, reason=reason, cure=cure),)
        super().__init__(str(self.diagnostics[0]))

    @classmethod
    def from_diagnostics(cls, title: str, diagnostics: Iterable[Diagnostic]) -> LoraError:
        """One error for every diagnostic of a validation pass; its message shows the first `MOST_SHOWN` of them."""
        found = tuple(diagnostics)
        assert found, "an error without a diagnostic tells the user nothing"
        lines = [f"  - {one}" for one in found[:MOST_SHOWN]]
        if len(found) > MOST_SHOWN:
            lines.append(f"  ... and {len(found) - MOST_SHOWN} more")
        return _rebuild(cls, "\n".join([title, *lines]), found)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks send each other their errors; the default would call the class with the message alone.
        return _rebuild, (type(self), str(self), self.diagnostics)


def _rebuild(cls: type[LoraError], message: str, diagnostics: tuple[Diagnostic, ...]) -> LoraError:
    error = cls.__new__(cls)
    ValueError.__init__(error, message)
    error.diagnostics = diagnostics
    return error


def raise_if_any(title: str, diagnostics: Iterable[Diagnostic]) -> None:
    """Raise one :class:`LoraError` that lists `diagnostics`, or return when there are none."""
    found = list(diagnostics)
    if found:
        raise LoraError.from_diagnostics(title, found)
