"""A quickstart of two steps on a base that was hardly taught: `small_quickstart.py OUTPUT MODEL [KEY=VALUE...]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_harness.quickstart import recipe as recipes
from lora_harness.quickstart import run as quickstart_run
from lora_harness.quickstart import run_quickstart

SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


def hardly_taught(*, model: Mapping[str, Any]) -> recipes.BaseRecipe:
    """The first check ends the warm-up."""
    return recipes.BaseRecipe(model={**model, **SMALL}, target=0.0, max_steps=20)


if __name__ == "__main__":
    output, model, *overrides = sys.argv[1:]
    quickstart_run.BaseRecipe = hardly_taught  # type: ignore[assignment,misc]
    run_quickstart(output=Path(output), model=model, steps=2, overrides=overrides)
