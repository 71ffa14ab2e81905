"""What the calls of the API take, checked before anything else: one clear error in place of a stray attribute's."""

from __future__ import annotations

from torch import nn

from lora_plugins_sdk.errors import LoraError


def expect(name: str, value: object, kinds: type | tuple[type, ...], *, cure: str) -> None:
    """Refuse an argument of another type.

    Args:
        name: the argument's name.
        value: what was given.
        kinds: what it may be.
        cure: how to get one of them.

    Raises:
        LoraError: `value` is none of them.
    """
    if not isinstance(value, kinds):
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        raise LoraError(
            f"argument {name!r}",
            reason=f"is of type {type(value).__name__}, expected {' or '.join(kind.__name__ for kind in wanted)}",
            cure=cure,
        )


def expect_model(model: object) -> None:
    """Refuse what is neither a module nor a list of modules.

    Raises:
        LoraError: so it is.
    """
    cure = "give this rank's model, or the list of its virtual pipeline chunks"
    chunks = model if isinstance(model, list | tuple) and model else [model]
    for chunk in chunks:
        expect("model", chunk, nn.Module, cure=cure)
