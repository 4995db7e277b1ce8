"""The watcher "saver": keeps the user's saver running, a process that copies checkpoints to a safe place.

It has a guard process of its own, since a stop of the ranks kills all descendants of theirs, and the saver
must outlive that. However the launcher ends, the guard ends the saver.
"""

from __future__ import annotations

import logging
import os
import selectors
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from aegis_elastic.agents.guard.client import Exited, GuardClient, GuardDied, GuardError, RankSpec, Stopped
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.worker.environment import as_given

logger = logging.getLogger(__name__)

# Between an end and the next start; doubled for each end in a row that comes within SOON_S of its start.
PAUSE_S, PAUSE_S_MAX = 3.0, 60.0
SOON_S = 60.0
# At the job's end: it may be copying the last checkpoint.
GRACE_S = 10.0
CLOSE_S = 5.0
RUN_ID_PREFIX = "fault-"
# Appends to its log: the saver may be started many times in one run.
_TO_LOG = 'exec >>"$0" 2>&1; exec "$@"'


def pause_s(ends_in_a_row: int) -> float:
    """Seconds to wait before the next start, after so many ends in a row within SOON_S of their start."""
    return float(min(PAUSE_S * 2 ** min(max(ends_in_a_row - 1, 0), 16), PAUSE_S_MAX))


class Saver:
    """The saver of one node: it is started with the first ranks and ends with the agent.

    `command` is split as a shell would, but not run by one. `log` "": the launcher's own output.
    """

    name = "saver"

    def __init__(
        self,
        wake: Callable[[], None],
        command: str,
        run_id: str,
        log: str = "",
        *,
        pause: Callable[[int], float] = pause_s,
    ) -> None:
        self._wake = wake
        self._argv = tuple(shlex.split(command))
        if log:
            self._argv = ("/bin/sh", "-c", _TO_LOG, log, *self._argv)
        self._run_id = f"{RUN_ID_PREFIX}{run_id}"
        self._pause = pause
        self._lock = threading.Lock()
        self._starts = 0
        self._pid = 0
        self._last_end = ""
        self._closing = threading.Event()
        self._read_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ called from the agent's loop

    def environment(self) -> Mapping[str, str]:
        """None."""
        return {}

    def on_started(self, ranks: WatchedRanks) -> None:
        """Start it, if it was not started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aegis-saver", daemon=True)
            self._thread.start()

    def on_ended(self) -> None:
        """Nothing: it has to save what the ranks have left."""

    def facts(self) -> Mapping[str, Any] | None:
        """How often it was started, its pid (0: it doesn't run), and how it ended last."""
        with self._lock:
            if not self._starts and not self._last_end:
                return None
            return {"starts": self._starts, "pid": self._pid, "last_end": self._last_end}

    def close(self) -> None:
        """End it: SIGTERM, and SIGKILL after GRACE_S."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._wake_fd, b"\0")
        if self._thread is not None:
            self._thread.join(GRACE_S + CLOSE_S + CLOSE_S)
            if self._thread.is_alive():
                # It still uses the descriptors: if closed, their numbers would soon be other files'.
                logger.warning("the saver's guard doesn't respond; the saver ends with this process")
                return
        os.close(self._read_fd)
        os.close(self._wake_fd)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        in_a_row = 0
        while not self._closing.is_set():
            started_s = time.monotonic()
            outcome = self._run_once()
            if self._closing.is_set():
                return
            in_a_row = in_a_row + 1 if time.monotonic() - started_s < SOON_S else 1
            wait_s = self._pause(in_a_row)
            logger.warning("the saver ended: %s; it is started again in %g s", outcome, wait_s)
            self._record(0, outcome)
            with selectors.DefaultSelector() as selector:
                selector.register(self._read_fd, selectors.EVENT_READ)
                selector.select(wait_s)

    def _run_once(self) -> str:
        """Start it with a guard of its own; returns how it ended. Its descendants end with the guard."""
        environment = {**as_given(os.environ), "TORCHELASTIC_RUN_ID": self._run_id}
        try:
            guard = GuardClient.start(f"saver of {self._run_id}")
        except GuardError as error:
            return str(error)
        try:
            pids = guard.spawn(0, [RankSpec(0, self._argv, environment, "", "")])
            self._record(pids[0], self._last_end)
            return self._wait_end(guard)
        except GuardError as error:
            return str(error)
        finally:
            guard.close()

    def _wait_end(self, guard: GuardClient) -> str:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            selector.register(guard, selectors.EVENT_READ)
            while True:
                selector.select()
                if self._closing.is_set():
                    self._stop(guard)
                    return "the job has ended"
                for event in guard.events():
                    if isinstance(event, Exited):
                        name = signal.Signals(event.signal).name if event.signal else ""
                        return name or f"exit code {event.exit_code}"
                    if isinstance(event, GuardDied):
                        return "its guard was killed"

    def _stop(self, guard: GuardClient) -> None:
        guard.stop(GRACE_S)
        deadline_s = time.monotonic() + GRACE_S + CLOSE_S
        while True:
            event = guard.wait_event(deadline_s - time.monotonic())
            if event is None or isinstance(event, (Stopped, GuardDied)):
                return

    def _record(self, pid: int, last_end: str) -> None:
        with self._lock:
            self._starts += bool(pid)
            self._pid, self._last_end = pid, last_end
        self._wake()
