"""Warm spares in the guard: started like ranks, held at the gate, made ranks by a "go" message. Part of the
guard program, stdlib only.

A spare is a process with the command of a rank that waits inside ``site`` (``worker/gate.py``). It belongs to
no generation: stopping ranks doesn't touch it, and the end of the guard kills it with everything else.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

# typing costs a third of the guard's start; the annotations below are never evaluated
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

if TYPE_CHECKING or "aegis_elastic" in sys.modules:
    from aegis_elastic.agents.guard.processes import (
        SpawnFailed,
        descendants,
        fork_rank,
        open_log,
        send_signal,
        to_bytes,
    )
else:
    from processes import SpawnFailed, descendants, fork_rank, open_log, send_signal, to_bytes

PACKET_BYTES = 1 << 18
# for the spare's answer to "go": it only sets variables, but its pages may have been swapped out
GO_TIMEOUT_S = 3.0


class Spare:
    """One held (or still importing) process."""

    __slots__ = ("channel", "held", "name", "pid", "pidfd")

    def __init__(self, name: str, pid: int, channel: socket.socket) -> None:
        self.name = name
        self.pid = pid
        self.channel = channel
        self.pidfd = os.pidfd_open(pid)
        self.held = False


class HeldSpares:
    """All spares of a guard. ``poll`` is the guard's; ``send`` sends an event to the launcher."""

    def __init__(self, poll: select.epoll, send: Callable[[dict[str, Any]], None]) -> None:
        self._poll = poll
        self._send = send
        self._spares: dict[str, Spare] = {}
        self._by_fd: dict[int, Spare] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Pids of all spares, held or not."""
        return frozenset(spare.pid for spare in self._spares.values())

    def hold(self, name: str, spec: dict[str, Any]) -> None:
        """Start a spare; the event "held" or "spare_gone" follows."""
        try:
            pid, reader, channel = fork_rank(spec, _open_placeholder)
        except SpawnFailed as error:
            self._send(
                {"event": "spare_gone", "spare": name, "why": f"cannot {error.args[2]}", "without": ""}
            )
            return
        os.close(reader)  # a command that can't be executed ends, and that is seen
        assert channel is not None
        channel.setblocking(False)
        spare = self._spares[name] = Spare(name, pid, channel)
        for fd in (spare.pidfd, channel.fileno()):
            self._by_fd[fd] = spare
            self._poll.register(fd, select.EPOLLIN)

    def owns(self, fd: int) -> bool:
        """Whether the descriptor belongs to a spare."""
        return fd in self._by_fd

    def on_readable(self, fd: int) -> None:
        """A spare has sent a message, or has ended."""
        spare = self._by_fd[fd]
        try:
            data = spare.channel.recv(PACKET_BYTES)
        except (BlockingIOError, ConnectionResetError):
            data = b""
        message = json.loads(data) if data else {}
        if message.get("held") == spare.pid:
            spare.held = True
            seconds, modules = message["seconds"], message["modules"]
            self._send({"event": "held", "spare": spare.name, "seconds": seconds, "modules": modules})
        else:
            # it reports why it is unfit, it ended, it closed its channel, or another process answers in its
            # place
            why = message.get("unfit") or "it did not stop at the gate"
            self._fail(spare, why, message.get("without", ""))

    def drop(self, name: str) -> None:
        """End a spare, without an event; does nothing if it is gone."""
        if name in self._spares:
            self._kill(self._spares[name])

    def send_go(self, spec: dict[str, Any]) -> Spare | None:
        """Send "go" to the spare that ``spec`` names; returns None if there is none to go, else a spare for
        ``wait_started``. Raises SpawnFailed if a log of the rank can't be opened: a cold start would fail,
        too.
        """
        spare = self._spares.get(spec.get("spare") or "")
        if spare is None or not spare.held:
            return None
        logs: list[tuple[int, int]] = []
        try:
            for number, stream in ((1, "stdout"), (2, "stderr")):
                fd = open_log(spec, stream)
                if fd >= 0:
                    logs.append((number, fd))
            go = {"env": spec["late"], "streams": [number for number, _ in logs]}
            socket.send_fds(spare.channel, [json.dumps(go).encode()], [fd for _, fd in logs])
        except SpawnFailed:
            raise
        except OSError:
            self._fail(spare, 'cannot send it "go"')
            return None
        finally:
            for _, fd in logs:
                os.close(fd)
        return spare

    def wait_started(self, spare: Spare) -> bool:
        """Wait for the answer to "go". True: it is a rank now, and no longer a spare."""
        answers = select.poll()
        answers.register(spare.channel, select.POLLIN)
        answer = {}
        if answers.poll(GO_TIMEOUT_S * 1000):
            try:
                answer = json.loads(spare.channel.recv(PACKET_BYTES) or b"{}")
            except OSError:
                answer = {}  # it died before its answer
        if answer.get("started") != spare.pid:
            self._fail(spare, answer.get("unfit", 'no answer to "go"'))
            return False
        self._remove(spare)
        return True

    def _fail(self, spare: Spare, why: str, without: str = "") -> None:
        self._kill(spare)
        self._send({"event": "spare_gone", "spare": spare.name, "why": why, "without": without})

    def _kill(self, spare: Spare) -> None:
        self._remove(spare)
        # only the guard's loop reaps it, later, so the pid can't be another process's by now
        for pid in (*descendants(spare.pid), spare.pid):
            send_signal(pid, signal.SIGKILL)

    def _remove(self, spare: Spare) -> None:
        for fd in (spare.pidfd, spare.channel.fileno()):
            self._poll.unregister(fd)
            del self._by_fd[fd]
        spare.channel.close()
        os.close(spare.pidfd)
        del self._spares[spare.name]


def _open_placeholder(spec: dict[str, Any], stream: str) -> int:
    """A file like the rank's log, since Python inspects its streams when it starts: one without a name in the
    same file system.
    """
    path = spec[stream]
    if not path:
        return -1
    try:
        return os.open(os.path.dirname(to_bytes(path)), os.O_WRONLY | os.O_TMPFILE, 0o600)
    except OSError:
        return os.memfd_create("aegis-spare")  # a file system without such files, or the folder is gone
