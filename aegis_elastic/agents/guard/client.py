"""The agent's side of the guard: start it, let it start ranks, read its events. No thread, made for a
selector loop.

Typical use::

    guard = GuardClient.start("job-7")
    selector.register(guard, selectors.EVENT_READ)
    pids = guard.spawn(generation=0, ranks=[RankSpec(0, ("python", "-u", "train.py"), env, "", "")])
    ...                      # whenever it is readable: for event in guard.events(): ...
    guard.stop(grace_s=1.0)  # and later the event Stopped
    guard.close()

``spawn`` reads the channel too; what comes before its answer, or with it, keeps the descriptor readable.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aegis_elastic.worker.environment import without_secrets

GUARD_PROGRAM = Path(__file__).with_name("guard.py")
START_TIMEOUT_S = 20.0  # interpreter start on a loaded node with a cold network file system
SPAWN_TIMEOUT_S = 120.0  # an exec from a stalled network file system
KILL_WAIT_S = 5.0
CLOSE_MARGIN_S = 5.0
READ_SIZE = 1 << 16
DEFAULT_STOP_SIGNAL = signal.SIGTERM
# signals that must not hit the guard before its handlers are set; it unblocks them itself
BLOCKED_AT_START = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class GuardError(RuntimeError):
    """The guard can't be started, doesn't answer or has ended."""


class SpawnError(GuardError):
    """A rank couldn't be started; none of its group runs. ``local_rank`` is -1 if it isn't due to a single
    rank.
    """

    def __init__(self, local_rank: int, errno: int, what: str) -> None:
        subject = f"rank {local_rank}" if local_rank >= 0 else "the ranks"
        super().__init__(f"cannot start {subject}: cannot {what}: {os.strerror(errno)}")
        self.local_rank = local_rank
        self.errno = errno
        self.what = what


class RankSpec(NamedTuple):
    """One training process. ``stdout``/``stderr`` are files to write (truncated); "" inherits the
    launcher's."""

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout: str
    stderr: str
    # "pass": the rank reports when it passes the gate (event GatePassed); "hold ...": see `GuardClient.hold`
    gate: str = ""
    # the spare that is to become this rank, and the variables of ``env`` that it doesn't have yet
    spare: str = ""
    late: Mapping[str, str] = {}


class Exited(NamedTuple):
    """A rank ended, or its interpreter is shutting down after an uncaught exception (then its exit makes no
    second event). One of ``exit_code`` and ``signal`` is set. ``first``: the first failure of its generation,
    before any stop order (a clean exit is no failure, and an exit after a stop order is caused by it).
    """

    generation: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    monotonic_s: float
    wall_s: float
    first: bool


class Stopped(NamedTuple):
    """A ``stop`` is done: nothing of the generation lives but the ``unkillable`` (pids that survived SIGKILL,
    as in uninterruptible sleep). ``killed``: pids, ranks or descendants, that needed SIGKILL."""

    generation: int
    killed: tuple[int, ...]
    unkillable: tuple[int, ...]


class GuardDied(NamedTuple):
    """The guard ended unexpectedly; the kernel has killed the ranks. The client is of no use any more."""

    exit_code: int | None
    signal: int | None


class GatePassed(NamedTuple):
    """A rank that was started cold ran our sitecustomize: its command can be held there."""

    generation: int
    local_rank: int


class SpareReady(NamedTuple):
    """A spare is past its imports and waits. ``seconds``: the time that they took."""

    spare: str
    seconds: float
    modules: int


class SpareGone(NamedTuple):
    """A spare can't be used (any more). ``without``: the package that must not be imported ahead, if it is
    due to one.
    """

    spare: str
    why: str
    without: str


Event = Exited | Stopped | GuardDied | GatePassed | SpareReady | SpareGone
_EVENT_TYPES = {"gate": GatePassed, "held": SpareReady, "spare_gone": SpareGone}


def _portable(text: str) -> str:
    # the guard runs isolated and may have another file system encoding: the channel carries the bytes
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def _encode(rank: RankSpec) -> dict[str, Any]:
    return {
        "local_rank": rank.local_rank,
        "argv": [_portable(argument) for argument in rank.argv],
        "env": {_portable(key): _portable(value) for key, value in rank.env.items()},
        "stdout": _portable(rank.stdout),
        "stderr": _portable(rank.stderr),
        "gate": rank.gate,
        "spare": rank.spare,
        "late": {_portable(key): _portable(value) for key, value in rank.late.items()},
    }


class GuardClient:
    """Owner of one guard process. Single-threaded: call it from one thread."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, kill_wait_s: float) -> None:
        self._process = process
        self._channel = channel
        self._kill_wait_s = kill_wait_s
        self._buffer = b""
        self._events: deque[Event] = deque()
        self._dead = False
        # Events may come together with an answer that is waited for: then the channel is empty, and yet there
        # are events to read.
        self._pending_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readable = select.epoll()
        for descriptor in (channel.fileno(), self._pending_fd):
            self._readable.register(descriptor, select.EPOLLIN)
        self.warm: frozenset[int] = frozenset()  # local ranks of the last `spawn` that were spares

    @classmethod
    def start(cls, title: str, *, kill_wait_s: float = KILL_WAIT_S) -> GuardClient:
        """Start a guard and wait for its hello. ``title`` (the job) is put into its command line.

        Args:
            kill_wait_s: how long after SIGKILL a process may live before it is reported as unkillable.

        Raises:
            GuardError: the process can't be started or ends at once; says why.
        """
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-I", "-S", str(GUARD_PROGRAM), str(theirs.fileno()), str(os.getpid())]
        # the rest is for people and for "pgrep -f 'torchrun|distributed.run'"
        argv += [str(kill_wait_s), "-m", "torch.distributed.run", "[torchrun", "guard]", title]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_AT_START)
        try:
            # its own session: a signal from a terminal or to a Slurm step reaches the launcher, which passes
            # it on once
            process = subprocess.Popen(
                argv,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=without_secrets(os.environ),
            )
        except OSError as error:
            ours.close()
            raise GuardError(f"cannot start the guard process {argv[0]!r}: {error}") from error
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        client = cls(process, ours, kill_wait_s)
        if client._reply(("hello",), START_TIMEOUT_S) is None:
            client.close()
            raise GuardError(
                f"cannot start the guard process: no hello from it (exit code {process.returncode})"
            )
        return client

    @property
    def pid(self) -> int:
        """Pid of the guard process."""
        return self._process.pid

    def fileno(self) -> int:
        """Descriptor that is readable when there may be events."""
        return self._readable.fileno()

    def hold(self, spare: str, rank: RankSpec) -> None:
        """Start a spare of that name: ``rank`` with ``gate`` "hold torch|plain PACKAGES-TO-LEAVE-OUT" and
        without the late variables in ``env``. Returns immediately; ``SpareReady`` or ``SpareGone`` follows.
        """
        self._send({"op": "hold", "spare": spare, "rank": _encode(rank)})

    def drop(self, spare: str) -> None:
        """End a spare; no event follows."""
        self._send({"op": "drop", "spare": spare})

    def spawn(self, generation: int, ranks: Sequence[RankSpec]) -> dict[int, int]:
        """Start all ranks of a generation, from their spares where they name a usable one. Returns local rank
        -> pid; ``warm`` has those that were spares.

        Raises:
            SpawnError: a rank can't be started, or an older generation still runs; those started are dead
            again. GuardError: the guard has ended, or doesn't answer and was ended (``GuardDied`` follows).
        """
        self._send(
            {
                "op": "spawn",
                "generation": generation,
                "ranks": [_encode(rank) for rank in ranks],
            }
        )
        reply = self._reply(("spawned", "spawn_error"), SPAWN_TIMEOUT_S)
        if reply is None:
            why = "it has ended"
            if not self._dead:
                why = f"no answer in {SPAWN_TIMEOUT_S:g} s"
                # If it started them minutes later, they would be ranks that nobody knows, and its answer
                # would be taken for that to the next start: this guard is of no use any more.
                self._process.kill()
                self._guard_ended()
            raise GuardError(
                f"cannot start generation {generation} through the guard (pid {self.pid}): {why}"
            )
        if reply["event"] == "spawn_error":
            raise SpawnError(reply["local_rank"], reply["errno"], reply["what"])
        self.warm = frozenset(reply["warm"])
        return {int(local_rank): pid for local_rank, pid in reply["pids"].items()}

    def signal(self, signum: int) -> None:
        """Send a signal to every living rank and the programs that it runs, not to its helper processes."""
        self._send({"op": "signal", "signum": int(signum)})

    def stop(
        self,
        grace_s: float,
        signum: int = DEFAULT_STOP_SIGNAL,
        wait_if_ignored: bool = True,
        wait_if_blocked: bool = True,
    ) -> None:
        """End the generation: ``signum`` to every rank as ``signal`` does, SIGKILL to every descendant when
        all ranks are gone or after ``grace_s`` (0: at once). Returns immediately; ``Stopped`` follows. A
        second call shortens or renews the grace. Does nothing but leave a ``GuardDied`` if the guard is
        dead.

        Args:
            wait_if_ignored: give the grace also to ranks that ignore the signal. wait_if_blocked: give it
            also to ranks that can't handle the signal, as they are blocked in a call.
        """
        self._send(
            {
                "op": "stop",
                "signum": int(signum),
                "grace_s": grace_s,
                "wait_if_ignored": wait_if_ignored,
                "wait_if_blocked": wait_if_blocked,
            }
        )

    def events(self) -> list[Event]:
        """The events since the last call; never waits."""
        if not self._readable.closed:
            with contextlib.suppress(BlockingIOError):  # no event is pending
                os.eventfd_read(self._pending_fd)
        self._receive()
        events = list(self._events)
        self._events.clear()
        return events

    def wait_event(self, timeout_s: float) -> Event | None:
        """The next event, or None after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self._events:
            left_s = deadline_s - time.monotonic()
            if self._dead or left_s <= 0 or not self._wait_readable(left_s):
                return None
            self._receive()
        return self._events.popleft()

    def close(self) -> None:
        """Kill whatever still runs, end the guard and reap it. Safe to call twice."""
        self._dead = True
        self._channel.close()
        if not self._readable.closed:
            self._readable.close()
            os.close(self._pending_fd)
        try:
            self._process.wait(self._kill_wait_s + CLOSE_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        if self._dead:
            return
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._receive()  # events that it wrote before its end, then the end itself

    def _wait_readable(self, timeout_s: float) -> bool:
        poll = select.poll()  # not select(): a launcher may hold more than 1024 descriptors
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _reply(self, wanted: tuple[str, ...], timeout_s: float) -> dict[str, Any] | None:
        """Wait for one of the answers ``wanted``; events that come before it are queued. None: dead, or timed
        out."""
        deadline_s = time.monotonic() + timeout_s
        while not self._dead:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._wait_readable(left_s):
                return None
            answers = self._receive()
            if self._events:
                os.eventfd_write(self._pending_fd, 1)
            for message in answers:
                if message["event"] in wanted:
                    return message
        return None

    def _receive(self) -> list[dict[str, Any]]:
        """Read the channel until it is empty; queue the events; return the other messages."""
        answers: list[dict[str, Any]] = []
        while not self._dead:
            try:
                data = self._channel.recv(READ_SIZE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._guard_ended()
                break
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                kind = message["event"]
                if kind == "exited":
                    del message["event"]
                    self._events.append(Exited(**message))
                elif kind == "stopped":
                    killed, unkillable = tuple(message["killed"]), tuple(message["unkillable"])
                    self._events.append(Stopped(message["generation"], killed, unkillable))
                elif kind in _EVENT_TYPES:
                    del message["event"]
                    self._events.append(_EVENT_TYPES[kind](**message))
                else:
                    answers.append(message)
        return answers

    def _guard_ended(self) -> None:
        self._dead = True
        # the channel closes a moment before the process can be reaped; a guard that lives on without it is
        # killed
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._events.append(GuardDied(code if code >= 0 else None, -code if code < 0 else None))
