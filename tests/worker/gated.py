"""Ranks of a real guard, started cold or out of a held spare, and what can be seen of them from outside."""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aegis_elastic.agents.guard.client import (
    Exited,
    GatePassed,
    GuardClient,
    RankSpec,
    SpareGone,
    SpareReady,
    Stopped,
)
from aegis_elastic.worker.environment import prepare_env
from aegis_elastic.worker.gate import LATE

PATIENCE_S = 60.0
RANK_ENV = {
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_RUN_ID": "job",
}


class End(NamedTuple):
    """How a rank ended: (exit code, signal), what it wrote, and its error file ("" if it wrote none)."""

    how: tuple[int | None, int | None]
    stdout: str
    stderr: str
    error: str


class Stage:
    """A folder with scripts and a guard that runs them; `run` once cold and once warm."""

    def __init__(self, folder: Path, guard: GuardClient) -> None:
        self.folder = folder
        self.guard = guard
        self._generation = 0

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def spec(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> RankSpec:
        self._generation += 1
        logs = self.folder / f"logs-{self._generation}"
        logs.mkdir()
        plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", *LATE)}
        full = {
            **plain,
            **RANK_ENV,
            "TORCHELASTIC_ERROR_FILE": str(self.folder / "error.json"),
            **(env or {}),
        }
        (self.folder / "error.json").unlink(missing_ok=True)
        return RankSpec(
            0,
            (sys.executable, *argv),
            prepare_env(full),
            str(logs / "out.log"),
            str(logs / "err.log"),
            "pass",
        )

    def cold(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> End:
        spec = self.spec(argv, env)
        self.guard.spawn(self._generation, [spec])
        return self.end(spec)

    def hold(self, spec: RankSpec, libraries: str = "plain", without: str = "") -> SpareReady | SpareGone:
        """Start a spare called "s"; returns its event."""
        early = {key: value for key, value in spec.env.items() if key not in LATE}
        gate = f"hold {libraries} {without}".rstrip()
        self.guard.hold("s", spec._replace(env=early, gate=gate))
        event = self.guard.wait_event(PATIENCE_S)
        assert isinstance(event, (SpareReady, SpareGone)), event
        return event

    def go(self, spec: RankSpec) -> int:
        """Make the spare "s" that rank; returns its pid."""
        late = {key: value for key, value in spec.env.items() if key in LATE}
        pids = self.guard.spawn(self._generation, [spec._replace(spare="s", late=late)])
        assert self.guard.warm == {0}, "the spare did not go"
        return pids[0]

    def warm(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, libraries: str = "plain"
    ) -> End:
        spec = self.spec(argv, env)
        held = self.hold(spec, libraries)
        assert isinstance(held, SpareReady), held
        self.go(spec)
        return self.end(spec)

    def _wait_exit(self, pid: int) -> None:
        """The guard may report a rank before its interpreter has ended; its output then counts, too."""
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(process, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), f"rank {pid} does not end"
        os.close(process)
        self.guard.stop(0.0)
        while not isinstance(event := self.guard.wait_event(PATIENCE_S), Stopped):
            assert event is not None, "no event for the stop"

    def end(self, spec: RankSpec) -> End:
        """Wait for the rank's end and read what it left."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not isinstance(event := self.guard.wait_event(deadline_s - time.monotonic()), Exited):
            assert isinstance(event, GatePassed), event
        self._wait_exit(event.pid)
        error = self.folder / "error.json"
        return End(
            (event.exit_code, event.signal),
            Path(spec.stdout).read_text(errors="backslashreplace"),
            Path(spec.stderr).read_text(errors="backslashreplace"),
            error.read_text() if error.exists() else "",
        )
