"""Fixtures for tests of the agent's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aegis_elastic.agents.guard.client import GuardClient


@pytest.fixture
def guard() -> Iterator[GuardClient]:
    """A guard process, ended afterwards."""
    client = GuardClient.start("test-job")
    yield client
    client.close()
