"""Hosts for the tests that need more than one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aegis_elastic.testing.netns import Net, NetnsUnavailable


@pytest.fixture
def net(request: pytest.FixtureRequest, tmp_path: Path, unmet: Callable[[str], None]) -> Iterator[Net]:
    """As many hosts as the test is parametrized with."""
    made = Net(request.param, share=[tmp_path])
    try:
        made.__enter__()
    except NetnsUnavailable as error:
        unmet(str(error))
    try:
        yield made
    finally:
        made.__exit__(None, None, None)
