"""Which test guards which row, what its cure is, and what of the row still has nothing that could show it."""

from __future__ import annotations

from known_faults.inkling_rows import INKLING
from known_faults.serving_rows import SERVING
from known_faults.training_rows import TRAINING

ROWS = TRAINING | SERVING | INKLING
