"""The fixture that runs a scenario against a real server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bus.plane import Plane, PlaneTest, running_plane


@pytest.fixture
def with_plane(tmp_path: Path) -> PlaneTest:
    """Run a scenario `async def scenario(plane)` against a fresh server, in 60 s at most."""

    def run(scenario: Callable[[Plane], Any], tls: bool = False) -> None:
        async def whole() -> None:
            async with running_plane(tmp_path, tls) as plane:
                await scenario(plane)
                leftover = [task for task in asyncio.all_tasks() if "bus" in task.get_name()]
                for bus in plane._open:
                    await bus.close()
                left = [task.get_name() for task in leftover if not task.done()]
                assert not left, f"tasks outlive the connections: {left}"

        asyncio.run(asyncio.wait_for(whole(), 60))

    return run
