"""Keep libraries' remarks about parts that are not installed, and their own progress bars, out of a run's output."""

from __future__ import annotations

import os
import warnings

# Remarks on optional accelerators and on the libraries' own future; none is about the user's run.
_MODULES = r"(megatron|transformers|torch)\."


def quiet_libraries() -> None:
    """Call before torch, megatron-core or transformers are imported. Errors and our own warnings stay."""
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=_MODULES)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
