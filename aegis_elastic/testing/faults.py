"""An `aegis-run` whose agent waits at gates, so that a test can inject a fault in a known phase.

    python -m aegis_elastic.testing.faults GATES [arguments of aegis-run]

Phases are over in milliseconds when nothing is wrong; "killed during Troubleshooting" would be luck. While
the file `GATES/<action>` exists, the agent does what an order of that action asks
(`core.protocol.orders.Action`: ready, bootcheck, stop, troubleshoot) but doesn't report that it has finished;
it still handles newer orders, and its heartbeat goes on. When the file is removed, it reports, unless another
order has come. Nothing of this is in the product: this module starts the same launcher with its own agent.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult
from aegis_elastic.core.protocol.orders import Action
from aegis_elastic.worker.environment import set_for_ourselves

IN_DELETE = 0x200
_EVENTS_BYTES = 4096


class Gates:
    """The test's side: all agents that have this folder wait at its closed gates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def close(self, action: Action) -> None:
        """From now on nobody finishes an order of this action."""
        (self.folder / action.value).touch()

    def open(self, action: Action) -> None:
        """Let them finish, those that wait and later ones."""
        (self.folder / action.value).unlink(missing_ok=True)


class _Deletions:
    """Readable when files were removed from a folder (by inotify, which Python's library lacks)."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(folder), IN_DELETE) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot watch {folder}: {os.strerror(code)}")

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        """Discard the events: the folder is read instead."""
        try:
            while os.read(self._fd, _EVENTS_BYTES):
                pass
        except BlockingIOError:
            return  # all read


def _gated_agent(folder: Path) -> Any:
    """The agent's class with gates in `folder`; made here, because it loads torch and a test needs none."""
    from aegis_elastic.agents.agent import AegisElasticAgent
    from aegis_elastic.agents.node import Node

    class GatedNode(Node):
        """Does everything in time, but reports that it has finished only when the gate is open."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._delayed_finish: Callable[[], None] | None = None
            self._deletions = _Deletions(folder)
            self.selector.register(self._deletions, selectors.EVENT_READ, self._on_opened)

        def finish(self, findings: tuple[Finding, ...] = (), checks: tuple[CheckResult, ...] = ()) -> None:
            order = self.state.order

            def finish_if_current() -> None:
                if self.state.order is order:
                    self.finish(findings, checks)

            self._delayed_finish = None
            if order is not None and (folder / order.action.value).exists():
                self._delayed_finish = finish_if_current
            else:
                super().finish(findings, checks)

        def _on_opened(self) -> None:
            self._deletions.drain()
            delayed_finish, self._delayed_finish = self._delayed_finish, None
            if delayed_finish is not None:
                delayed_finish()

    class GatedAgent(AegisElasticAgent):
        """An agent of such a node."""

        node_type = GatedNode

    return GatedAgent


def main(argv: list[str]) -> int:
    """Run `aegis-run` with gates; returns its exit code."""
    # As `launch.run` does, but before torch is loaded, which happens earlier here.
    set_for_ourselves(os.environ, TORCH_CPP_LOG_LEVEL="ERROR")
    from aegis_elastic.launch import run
    from aegis_elastic.launch.launcher import Launcher

    Launcher.agent_type = _gated_agent(Path(argv[0]))
    return run.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
