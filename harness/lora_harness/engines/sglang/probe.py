"""Whether an interpreter has SGLang. The trainer asks its own, and another one runs this file, which imports nothing of
the harness: it need not be there.
"""

from __future__ import annotations

import importlib.util
import sys

# Exit code; Python's own are 1 and 2.
ABSENT = 41


def has_sglang() -> bool:
    """Looks without importing, which takes many seconds. A folder of the name alone is not SGLang."""
    found = importlib.util.find_spec("sglang")
    return found is not None and found.origin is not None


if __name__ == "__main__":
    sys.exit(0 if has_sglang() else ABSENT)
