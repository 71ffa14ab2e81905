"""Functions named in a config as ``module:function``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lora_plugins_sdk.errors import LoraError


def import_function(path: str, *, key: str) -> Callable[..., Any]:
    """Import ``module:function``. Modules in the current directory are found too.

    Args:
        path: e.g. ``my_rewards:length_reward``.
        key: the config key that holds the path, named in errors.

    Raises:
        LoraError: the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script does not
    subject = f"{key} = {path!r}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise LoraError(
            subject,
            reason=f"importing {module_name} failed with {type(error).__name__}: {error}",
            cure=f"install it, or start from the directory that holds {module_name.split('.')[0]}.py",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        close = difflib.get_close_matches(name, known, n=1)
        raise LoraError(
            subject,
            reason=f"{module.__file__ or module_name} has no function {name!r}",
            cure=f"did you mean {close[0]!r}?" if close else f"define {name} there",
        )
    return function
