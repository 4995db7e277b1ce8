"""Planes and agents that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.control.kube import Api
from tests.control.planes import Agent, Held, config

Hold = Callable[..., Held]
MakeAgent = Callable[..., Agent]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what the test has opened, the last first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hold(tmp_path: Path, stack: ExitStack) -> Hold:
    """`hold(job="job", **config)`: start or take up a plane."""

    def make(job: str = "job", *, restarts_max: int = 0, **changes: Any) -> Held:
        held = Held(config(tmp_path, job, **changes), restarts_max)
        stack.callback(held.close)
        return held

    return make


@pytest.fixture
def agent(stack: ExitStack) -> MakeAgent:
    """`agent(plane, worker)`: an agent's link, joining."""

    def make(plane: Held, worker: str, secret: bytes | None = None, address: str = "127.0.0.1") -> Agent:
        made = Agent(plane, worker, secret, address)
        stack.callback(made.close)
        return made

    return make


@pytest.fixture(scope="module")
def shared_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One plane for the tests of a module that leave it as it was."""
    held = Held(config(tmp_path_factory.mktemp("shared")))
    yield held
    held.close()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(made.server.server_port))
    monkeypatch.setenv("AEGIS_KUBERNETES_ACCOUNT", str(tmp_path))
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()
