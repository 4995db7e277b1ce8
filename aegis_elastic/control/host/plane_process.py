"""The launcher's hold on the control plane of its host: start it or take it up again, keep it alive, let
it go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.control.host import config as plane_config
from aegis_elastic.control.host.config import LOG_FILE, SOCKET_FILE, PlaneConfig
from aegis_elastic.control.host.errors import LaunchError
from aegis_elastic.control.host.run_directories import make_private
from aegis_elastic.worker.environment import without_secrets

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 8.0
LOCK_FILE = "plane.lock"


class PlaneFailed(LaunchError):
    """The control plane can't be started: training goes on without it, if it can."""


class PortTaken(PlaneFailed):
    """Another program has the endpoint's port: the user's to mend."""

    exit_code = 2


class StartingPlane:
    """A plane that has been started and has no job yet: it imports while its launcher does."""

    def __init__(self) -> None:
        self.used = False
        self.holder, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aegis_elastic.control.host.supervisor", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                # It reads the secret from its configuration, which nobody else can.
                env=without_secrets(os.environ),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )

    def discard(self) -> None:
        """End it, unless it has been given a job."""
        if not self.used:
            self.used = True
            self.holder.close()
            self.process.wait()


class PlaneProcess:
    """Holds one plane: `open` it, then `close` it. Starts it again when it dies, a limited number of
    times.
    """

    def __init__(
        self,
        config: PlaneConfig,
        restarts_max: int,
        announce: Callable[[str], None],
        starting_plane: StartingPlane | None = None,
        on_ended: Callable[[str], None] | None = None,
    ) -> None:
        """`starting_plane`: a plane started ahead; `open` discards it if it isn't used. `on_ended` gets
        the phase in which the job has ended, perhaps more than once, by a thread of ours.
        """
        self._on_ended = on_ended
        self._config = config
        self._starting_plane = starting_plane
        self._restarts_left = restarts_max
        self._announce = announce
        self._holder: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.port = 0
        self.run_dir = Path()
        self.generation = 0
        self.resumed = False

    def open(self) -> None:
        """Start the plane, or take up the one that is there. PortTaken, PlaneFailed."""
        self._adopt_or_start()
        if self._starting_plane is not None:
            # There was a plane: this one would idle for as long as the job runs.
            self._starting_plane.discard()
            self._starting_plane = None
        self._thread = threading.Thread(target=self._watch, name="aegis-plane-host", daemon=True)
        self._thread.start()

    @property
    def hold(self) -> int:
        """The descriptor by which the plane is held, -1 for none. A program that is executed in our place
        and inherits it holds the plane until it has taken it up by itself.
        """
        return self._holder.fileno() if self._holder is not None else -1

    def close(self, wait: bool = True) -> None:
        """Let the plane go; it ends when nobody needs it. `wait` for that, if it is our child."""
        self._closing.set()
        holder, process = self._holder, self._process
        if holder is not None:
            with contextlib.suppress(OSError):
                holder.shutdown(socket.SHUT_RDWR)
            holder.close()
        if self._thread is not None:
            self._thread.join(LEAVE_TIMEOUT_S)
        if process is not None and wait:
            try:
                process.wait(LEAVE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.info("the control plane stays for the nodes that are still connected")

    def _adopt_or_start(self) -> None:
        # Under the lock also after its end: other launchers of this host want it back too.
        try:
            with _locked(self._config.path.parent):
                if not self._adopt():
                    self._start()
        except OSError as error:
            # A full disk, say. Who can't be protected can train all the same.
            raise PlaneFailed(f"cannot start the control plane: {error}") from error

    def _adopt(self) -> bool:
        """Whether a living plane of this job was found here; then it is ours to hold."""
        directory = os.open(self._config.path, os.O_PATH) if self._config.path.is_dir() else -1
        if directory < 0:
            return False
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Through the descriptor: a socket's path has at most 107 bytes, state directories may be deeper.
            holder.connect(f"/proc/self/fd/{directory}/{SOCKET_FILE}")
        except OSError:
            holder.close()
            return False
        finally:
            os.close(directory)
        try:
            self._await_ready(holder)
        except PlaneFailed as error:
            # It was about to end. Ours waits until it has.
            logger.info("the control plane that was running here has ended: %s", error)
            return False
        self._announce("took up the control plane that was running here")
        return True

    def _start(self) -> None:
        plane_config.save(self._config)
        starting_plane, self._starting_plane = self._starting_plane or StartingPlane(), None
        starting_plane.used = True
        self._process = starting_plane.process
        starting_plane.holder.sendall(f"{self._config.path}\n".encode())
        self._await_ready(starting_plane.holder)

    def _await_ready(self, holder: socket.socket) -> None:
        holder.settimeout(READY_TIMEOUT_S)
        state = _first_state(holder)
        if "ready" not in state:
            holder.close()
            why = str(state.get("failed", f"it did not answer; see {self._config.path / LOG_FILE}"))
            kind = PortTaken if "cannot listen on" in why else PlaneFailed
            raise kind(f"cannot start the control plane: {why}")
        holder.settimeout(None)
        ready = state["ready"]
        self._holder = holder
        self.port, self.run_dir = int(ready["port"]), Path(ready["runDir"])
        self.generation, self.resumed = int(ready["generation"]), bool(ready["resumed"])

    def _watch(self) -> None:
        """Notice the plane's end, and start it again while we are here."""
        while not self._closing.is_set():
            assert self._holder is not None
            # Lines that are no JSON come from a plane that is ending; what follows is the same.
            with contextlib.suppress(OSError, ValueError):
                self._read_until_end(self._holder)
            if self._closing.is_set():
                return
            if self._process is not None:
                self._process.wait()
            if self._restarts_left <= 0:
                self._announce(
                    "the control plane has ended and is not started again; training is not touched"
                )
                return
            self._restarts_left -= 1
            self._announce("the control plane has ended: starting it again; training is not touched")
            self._config = msgspec.structs.replace(
                self._config, port=self.port, resume=True, leads=self.generation
            )
            try:
                self._adopt_or_start()
            except LaunchError as error:
                self._announce(str(error))
                self._closing.wait(1.0)

    def _read_until_end(self, holder: socket.socket) -> None:
        """Read the plane's states until it is gone; all but the job's end is known here."""
        buffer = b""
        while data := holder.recv(4096):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                ended = json.loads(line).get("ended")
                if ended and self._on_ended is not None:
                    self._on_ended(ended)


def _first_state(holder: socket.socket) -> dict[str, Any]:
    buffer, until = b"", time.monotonic() + READY_TIMEOUT_S
    while b"\n" not in buffer and time.monotonic() < until:
        try:
            data = holder.recv(4096)
        except OSError:
            return {}
        if not data:
            return {}
        buffer += data
    state: dict[str, Any] = json.loads(buffer.split(b"\n")[0])
    return state


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One launcher of a host at a time adopts, or starts, this job's plane."""
    make_private(directory)
    with open(directory / LOCK_FILE, "ab", opener=_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
