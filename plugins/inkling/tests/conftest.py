"""What several tests of this plugin use."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Print a measured figure and record it in the test report."""

    def record(name: str, value: float) -> None:
        print(f"{name}: {value:.3g}")
        record_property(name, value)

    return record
