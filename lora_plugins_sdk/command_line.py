"""How every command line of this project ends on a user's error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lora_plugins_sdk.errors import LoraError

USER_ERROR = 2


def run_command_line(app: Callable[..., Any], name: str) -> None:
    """Run a typer app. A user's error is one message and exit code 2; `--debug` shows its traceback.

    Args:
        app: its callback sets `debug` in the context's object when the option is given.
        name: what the message begins with.
    """
    state: dict[str, bool] = {}
    try:
        app(obj=state)
    except LoraError as error:
        if state.get("debug"):
            raise
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
