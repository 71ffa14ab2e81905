"""From nothing to a trained adapter: a small base, a GRPO run, and its held-out reward before and after."""

from lora_harness.quickstart.run import run_quickstart

__all__ = ["run_quickstart"]
