"""The fixtures that run a scenario over the stores."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.backends import BACKENDS, SERVERS, Backend, missing, running

Scenario = Callable[[Backend], Any]
Over = Callable[[Scenario], None]


def _over(name: str, directory: Path, unmet: Callable[[str], None]) -> Over:
    why = missing(name)
    if why is not None:
        unmet(why)

    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            async with running(name, directory) as backend:
                await scenario(backend)

        asyncio.run(asyncio.wait_for(whole(), 90))

    return run


@pytest.fixture(params=list(BACKENDS))
def over_all(request: pytest.FixtureRequest, tmp_path: Path, unmet: Callable[[str], None]) -> Over:
    """Run `async def scenario(backend)` over each store."""
    return _over(request.param, tmp_path, unmet)


@pytest.fixture(params=SERVERS)
def over_servers(request: pytest.FixtureRequest, tmp_path: Path, unmet: Callable[[str], None]) -> Over:
    """Run `async def scenario(backend)` over each store that has a server of its own."""
    return _over(request.param, tmp_path, unmet)


@pytest.fixture
def over_jetstream(tmp_path: Path, unmet: Callable[[str], None]) -> Over:
    """Run `async def scenario(backend)` over JetStream only."""
    return _over("jetstream", tmp_path, unmet)
