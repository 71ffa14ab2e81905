"""A context manager that is entered around what is measured, in every process that measures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any, cast

from lora_plugins_sdk.errors import LoraError

Factory = Callable[[], AbstractContextManager[object]]


def entered(around: str | None) -> AbstractContextManager[object]:
    """The context manager that `around` names, `package.module:factory`, or one that does nothing.

    A seeded fault (a mutant) is put in this way: the factory takes no argument and returns a context manager.

    Raises:
        LoraError: there is no such factory.
    """
    return nullcontext() if around is None else find_factory(around)()


def find_factory(around: str) -> Factory:
    """The factory that `around` names.

    Raises:
        LoraError: there is none.
    """
    cure = "write it as package.module:factory"
    try:
        factory: Any = resolve_name(around)
    except (ImportError, AttributeError, ValueError) as error:
        raise LoraError(f"around={around!r}", reason=f"cannot be imported ({error})", cure=cure) from error
    if callable(factory):
        return cast(Factory, factory)
    raise LoraError(f"around={around!r}", reason=f"is a {type(factory).__name__}, not a function", cure=cure)
