"""Seeds of simulated runs: some of them in every `make test`, the others among the slow tests."""

from typing import Any

import pytest


def seeds(num_always: int, total: int) -> list[Any]:
    """Parameters of a test: ranges that make up range(total)."""
    others = range(num_always, total)
    return [
        pytest.param(range(num_always), id="some"),
        pytest.param(others, id="others", marks=pytest.mark.slow),
    ]
