from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm import cluster


@pytest.fixture(autouse=True)
def _needs_slurm(unmet: Callable[[str], None]) -> None:
    if lacking := cluster.missing():
        unmet(lacking)
