"""A whole training run killed with SIGKILL while it saves, prunes or exports goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_killed_run_ends_with_the_adapter_of_one_that_lived(tmp_path: Path) -> None:
    """One random point of each kind; `killed_training.py DIRECTORY --points 20` takes more.

    Whatever a kill leaves under a name that counts is whole; after `--resume auto` adapter, meta file and moments are
    those of the unkilled run bit for bit, and no other file is left.
    """
    script = Path(__file__).with_name("killed_training.py")
    path = os.pathsep.join([str(script.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, script, tmp_path, "--points", "3", "--seed", "7"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    assert [phase for phase, _, _ in found["points"]] == ["save", "prune", "export"]
    assert all(found["operations"][phase] > 10 for phase in ("save", "prune", "export"))
