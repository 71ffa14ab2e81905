"""Errors that SGLang must not swallow.

SGLang catches `Exception` around a plugin, logs it and goes on, so these derive from `SystemExit`: the process ends
with the message.
"""

from __future__ import annotations


class CannotActivate(SystemExit):
    """The CPU plugin was asked for where it cannot work. The message says why and the way out."""


class UnsupportedSGLang(SystemExit):
    """A function that the plugin replaces is gone or takes other arguments. The message names it and the supported
    version."""
