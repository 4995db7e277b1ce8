"""The guard: parent and sub-reaper of a node's ranks. Run as a program, not imported.

Theory
------
The launcher may die in any way, SIGKILL included, and nothing of the job may outlive it. Parent-death signals
alone don't ensure that (they reach direct children only), so the ranks are children of this small process:

* it is a *sub-reaper*: a descendant that loses its parent (double fork, dead rank) becomes its child,
  whatever sessions it makes;
* it has one end of a socket pair and a pidfd of the launcher: on end of file or the launcher's death it kills
  everything and ends. The pidfd is needed because a forked child of the launcher may keep the socket open;
* killing is a loop "list descendants, SIGKILL, reap" until none is left. Reparenting happens before the
  parent's death is reported, so whatever a dying process forked in between is on the next list;
* if this process itself is killed, the kernel kills the ranks (PR_SET_PDEATHSIG, set in each rank before
  exec).

Deaths are seen by pidfd: epoll returns them in the order in which they happened, so the first failure is
known (``waitpid(-1)`` returns children in the order of their start).

States: RUN --stop--> TERM (signal sent, grace runs) --ranks gone or grace over--> KILL --nobody left--> RUN,
"stopped".

Stdlib only and few imports: it runs as ``python -I -S guard.py`` and starts in a few milliseconds. The
command line carries what preemption traps search for (``pgrep -f "torchrun|distributed.run"``). Wire: one
JSON object a line; byte strings travel as UTF-8 with surrogate escapes, because environments need not be
text.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time

# typing costs a third of this program's start; annotations are never evaluated
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

if TYPE_CHECKING or __name__ != "__main__":
    from aegis_elastic.agents.guard.exiting import ExitingRanks
    from aegis_elastic.agents.guard.held import HeldSpares
    from aegis_elastic.agents.guard.processes import (
        FORWARDED,
        PR_SET_CHILD_SUBREAPER,
        PR_SET_NAME,
        Rank,
        SpawnFailed,
        descendants,
        fork_rank,
        ignores,
        prctl,
        programs_of,
        send_signal,
    )
    from aegis_elastic.agents.guard.signal_handling import still_blocked, wait_state
else:
    # run as a program: isolated, so without the package. Last on the path, so that no stdlib module is
    # shadowed
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from exiting import ExitingRanks
    from held import HeldSpares
    from processes import (
        FORWARDED,
        PR_SET_CHILD_SUBREAPER,
        PR_SET_NAME,
        Rank,
        SpawnFailed,
        descendants,
        fork_rank,
        ignores,
        prctl,
        programs_of,
        send_signal,
    )
    from signal_handling import still_blocked, wait_state

RUN, TERM, KILL = "run", "term", "kill"
READ_SIZE = 1 << 16
BLOCKED_POLL_S = 0.05  # between two checks whether a rank can handle the stop signal
NEVER_S = float("inf")
EXIT_UNCAUGHT = 1  # of a Python whose script ended in an exception


class Guard:
    """The event loop. One generation of ranks at a time; ``channel`` is the socket to the launcher."""

    def __init__(self, channel: socket.socket, launcher_pid: int, kill_wait_s: float) -> None:
        self._channel = channel
        self._kill_wait_s = kill_wait_s
        self._ranks: dict[int, Rank] = {}  # by pid
        self._watched: dict[int, Rank] = {}  # by pidfd
        self._generation = -1
        self._failure_seen = False
        self._phase = RUN
        self._deadline_s = self._blocked_poll_s = 0.0
        self._reply: dict[str, Any] = {}  # sent to the launcher at the end of the kill phase
        self._awaited: list[int] = []  # pids that got the stop signal, and the grace is for
        # wait states before the signal, by pid; {}: blocked ranks are waited for, too
        self._wait_states: dict[int, tuple[bytes, int] | None] = {}
        self._killed: set[int] = set()
        self._unkillable: set[int] = set()  # survived SIGKILL for kill_wait_s
        self._closing = self._finished = False
        self._received = self._unsent = b""
        self._wake_fd, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for signum in (*FORWARDED, signal.SIGCHLD):
            signal.signal(signum, lambda _signum, _frame: None)
        # the launcher blocked these while it started us, so that none could hit us before the handlers were
        # set
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        self._launcher_fd = os.pidfd_open(launcher_pid)
        self._poll = select.epoll()
        for fd in (channel.fileno(), self._wake_fd, self._launcher_fd):
            self._poll.register(fd, select.EPOLLIN)
        self._spares = HeldSpares(self._poll, self._send)
        self._exiting = ExitingRanks(self._poll)
        self._gates: dict[int, tuple[socket.socket, Rank]] = {}  # cold ranks that may report the gate

    def run(self) -> None:
        """Serve the launcher until it ends or closes the channel; returns when no descendant is left."""
        self._send({"event": "hello", "pid": os.getpid()})
        while not self._finished:
            for fd, mask in self._poll.poll(self._timeout_s()):
                self._dispatch(fd, mask)
            self._reap_adopted()
            self._advance()

    def close(self) -> None:
        """Kill everything, then let ``run`` return."""
        self._closing = True
        # also if a stop kills already: now the spares are killed, too, and get the same time to die
        self._begin_kill(self._reply if self._phase == KILL else None)

    def _timeout_s(self) -> float | None:
        if self._phase == RUN:
            return None
        if self._deadline_s == NEVER_S:
            return 0.0  # nobody has been killed yet
        left_s = max(0.0, self._deadline_s - time.monotonic())
        return min(left_s, BLOCKED_POLL_S) if self._phase == TERM and self._wait_states else left_s

    def _dispatch(self, fd: int, mask: int) -> None:
        if fd == self._channel.fileno():
            if mask & select.EPOLLOUT:
                self._flush()
            if mask & ~select.EPOLLOUT:
                self._receive()
        elif fd == self._launcher_fd:
            self._on_launcher_gone()
        elif fd == self._wake_fd:
            for signum in os.read(fd, READ_SIZE):
                if signum in FORWARDED:
                    self._signal_ranks(signum)
        elif fd in self._watched:
            self._collect(self._watched[fd])
        elif self._spares.owns(fd):
            self._spares.on_readable(fd)
        elif self._exiting.owns(fd):
            self._on_exiting()
        elif fd in self._gates:  # else: its death was handled earlier in this round
            self._on_gate(fd)

    def _on_launcher_gone(self) -> None:
        for fd in (self._channel.fileno(), self._launcher_fd):
            try:
                self._poll.unregister(fd)
            except FileNotFoundError:
                continue  # both the socket and the pidfd may report it
        self.close()

    # -- the channel -----------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        # never blocks: a stalled launcher must not stall the guard. At most a few events a rank can wait here
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        if self._closing:
            return
        try:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            pass  # the rest goes when epoll says so
        except (BrokenPipeError, ConnectionResetError):
            self._on_launcher_gone()
            return
        self._poll.modify(self._channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def _receive(self) -> None:
        try:
            data = self._channel.recv(READ_SIZE)
        except (BlockingIOError, ConnectionResetError) as error:
            if isinstance(error, ConnectionResetError):
                self._on_launcher_gone()
            return
        if not data:
            self._on_launcher_gone()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            operation = command["op"]
            if operation == "spawn":
                self._spawn(command["generation"], command["ranks"])
            elif operation == "signal":
                self._signal_ranks(command["signum"])
            elif operation == "stop":
                self._stop(
                    command["signum"],
                    command["grace_s"],
                    command["wait_if_ignored"],
                    command["wait_if_blocked"],
                )
            elif operation == "hold":
                self._spares.hold(command["spare"], command["rank"])
            elif operation == "drop":
                self._spares.drop(command["spare"])
            else:
                known = "spawn, signal, stop, hold, drop"
                raise ValueError(f"cannot serve operation {operation!r}: not one of {known}")

    # -- starting and ending ---------------------------------------------------------------------------------

    def _spawn(self, generation: int, specs: list[dict[str, Any]]) -> None:
        if self._phase != RUN or self._alive():
            what = f"start generation {generation} while generation {self._generation} runs"
            self._send({"event": "spawn_error", "local_rank": -1, "errno": errno.EBUSY, "what": what})
            return
        self._generation, self._failure_seen = generation, False
        started: list[Rank] = []
        self._exiting.watch(specs)
        try:
            # all get their "go" before the first is waited for, so that they start in parallel
            spares = [self._spares.send_go(spec) for spec in specs]
            for spec, spare in zip(specs, spares, strict=True):
                if spare is not None and self._spares.wait_started(spare):
                    started.append(self._adopt(Rank(generation, spec["local_rank"], spare.pid)))
            warm = {rank.local_rank for rank in started}
            self._start_cold(generation, [spec for spec in specs if spec["local_rank"] not in warm], started)
        except SpawnFailed as failure:
            for rank in started:
                rank.silent = True
            local_rank, code, what = failure.args
            self._begin_kill({"event": "spawn_error", "local_rank": local_rank, "errno": code, "what": what})
            return
        pids = {rank.local_rank: rank.pid for rank in started}
        self._send({"event": "spawned", "generation": generation, "pids": pids, "warm": sorted(warm)})

    def _start_cold(self, generation: int, specs: list[dict[str, Any]], started: list[Rank]) -> None:
        readers: list[int] = []
        failure: SpawnFailed | None = None
        first = len(started)
        for spec in specs:
            try:
                pid, reader, gate = fork_rank(spec)
            except SpawnFailed as error:
                failure = error
                break
            rank = self._adopt(Rank(generation, spec["local_rank"], pid))
            started.append(rank)
            readers.append(reader)
            if gate is not None:
                self._gates[gate.fileno()] = gate, rank
                self._poll.register(gate, select.EPOLLIN)
        for rank, reader, spec in zip(started[first:], readers, specs, strict=False):
            code = os.read(reader, 16)  # end of file at exec
            os.close(reader)
            if code and failure is None:
                failure = SpawnFailed(rank.local_rank, int(code), f"execute {spec['argv'][0]}")
        if failure is not None:
            raise failure

    def _adopt(self, rank: Rank) -> Rank:
        self._ranks[rank.pid] = self._watched[rank.pidfd] = rank
        self._poll.register(rank.pidfd, select.EPOLLIN)
        return rank

    def _on_gate(self, fd: int) -> None:
        gate, rank = self._gates.pop(fd)
        self._poll.unregister(fd)
        with gate:
            try:
                answer = gate.recv(32)
            except ConnectionResetError:
                answer = b""
        # a wrapper's Python may send this too, but it is another process: such a command can't have spares
        if answer == b"%d" % rank.pid:
            self._send({"event": "gate", "generation": rank.generation, "local_rank": rank.local_rank})

    def _alive(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.pid not in self._unkillable]

    def _signal_ranks(self, signum: int) -> list[int]:
        """Send the signal; returns the pids that got it."""
        pids = [pid for rank in self._alive() for pid in programs_of(rank.pid)]
        return [pid for pid in pids if send_signal(pid, signum)]

    def _stop(self, signum: int, grace_s: float, wait_if_ignored: bool, wait_if_blocked: bool) -> None:
        if self._phase == KILL:
            return  # already killing; its "stopped" follows
        if grace_s > 0:
            self._phase, self._deadline_s = TERM, time.monotonic() + grace_s
            self._blocked_poll_s = time.monotonic() + BLOCKED_POLL_S
            pids = [pid for rank in self._alive() for pid in programs_of(rank.pid)]
            self._wait_states = {} if wait_if_blocked else {pid: wait_state(pid) for pid in pids}
            self._awaited = [pid for pid in pids if send_signal(pid, signum)]
            if not wait_if_ignored:
                self._awaited = [pid for pid in self._awaited if not ignores(pid, signum)]
        else:
            self._begin_kill()

    def _begin_kill(self, reply: dict[str, Any] | None = None) -> None:
        # the time to die begins with the first SIGKILL
        self._phase, self._deadline_s = KILL, NEVER_S
        self._reply = reply or {"event": "stopped", "generation": self._generation}
        self._killed = set()

    def _awaited_are_gone(self) -> bool:
        """Whether the ranks and their programs that the grace is for have ended (a wrapper may end long
        before the program that it runs); other descendants are not waited for.
        """
        if any(rank.pid in self._awaited for rank in self._alive()):
            return False
        tree = descendants(os.getpid())
        return all(tree.get(pid, "Z") == "Z" for pid in self._awaited)

    def _advance(self) -> None:
        if self._phase == TERM and self._wait_states and time.monotonic() >= self._blocked_poll_s:
            self._blocked_poll_s = time.monotonic() + BLOCKED_POLL_S
            self._awaited = [
                pid for pid in self._awaited if not still_blocked(pid, self._wait_states.get(pid))
            ]
        if self._phase == TERM and (self._awaited_are_gone() or time.monotonic() >= self._deadline_s):
            self._begin_kill()
        if self._phase != KILL:
            return
        # spares wait for the next generation, unless everything ends
        tree = descendants(os.getpid(), frozenset() if self._closing else self._spares.pids)
        self._unkillable.intersection_update(tree)
        left = [pid for pid in tree if pid not in self._unkillable]
        if left and time.monotonic() >= self._deadline_s:
            self._unkillable.update(left)
            left = []
        for pid in left:
            # a "corpse" too: a process whose main thread has ended looks like one while its other threads
            # live
            if send_signal(pid, signal.SIGKILL) and tree[pid] != "Z":
                self._killed.add(pid)
        if left and self._deadline_s == NEVER_S:
            self._deadline_s = time.monotonic() + self._kill_wait_s
        if not left:
            self._phase, self._finished = RUN, self._closing
            self._exiting.close()
            dead = sorted(self._killed - self._unkillable)
            self._send({**self._reply, "killed": dead, "unkillable": sorted(self._unkillable)})

    # -- deaths ----------------------------------------------------------------------------------------------

    def _collect(self, rank: Rank) -> None:
        info = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOHANG)
        del self._watched[rank.pidfd]
        os.close(rank.pidfd)
        rank.pidfd = -1
        if info is not None:  # else a tracer (py-spy, gdb) holds the corpse: SIGCHLD comes when it lets go
            self._on_exit(rank, info)

    def _reap_adopted(self) -> None:
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            rank = self._ranks.get(info.si_pid)
            if rank is not None and rank.pidfd >= 0:
                return  # its pidfd is readable: the next round takes it, in the order of death
            os.waitid(os.P_PID, info.si_pid, os.WEXITED)
            if rank is not None:
                self._on_exit(rank, info)

    def _on_exit(self, rank: Rank, info: os.waitid_result) -> None:
        del self._ranks[rank.pid]
        if rank.silent:
            return
        by_itself = info.si_code == os.CLD_EXITED
        code, signum = (info.si_status, None) if by_itself else (None, info.si_status)
        self._send_exit(rank, code, signum)

    def _on_exiting(self) -> None:
        """A rank has failed and only its interpreter is left to end: report that exit now."""
        for local_rank, pid in self._exiting.read():
            rank = self._ranks.get(pid)
            if rank is not None and rank.local_rank == local_rank and not rank.silent and self._phase == RUN:
                self._send_exit(rank, EXIT_UNCAUGHT, None)
                rank.silent = True

    def _send_exit(self, rank: Rank, code: int | None, signum: int | None) -> None:
        # an exit after a stop order is caused by it, and a clean exit is no failure
        current = self._phase == RUN and rank.generation == self._generation
        first = code != 0 and current and not self._failure_seen
        self._failure_seen = self._failure_seen or first
        self._send(
            {
                "event": "exited",
                "generation": rank.generation,
                "local_rank": rank.local_rank,
                "pid": rank.pid,
                "exit_code": code,
                "signal": signum,
                "monotonic_s": time.monotonic(),
                "wall_s": time.time(),
                "first": first,
            }
        )


def main() -> None:
    """Arguments: descriptor of the channel, pid of the launcher, kill_wait_s; the rest is a title."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    channel.set_inheritable(False)
    launcher_pid = int(sys.argv[2])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    name = ctypes.create_string_buffer(b"torchrun")  # for "pkill torchrun", which looks at the short name
    prctl(PR_SET_NAME, ctypes.addressof(name))
    if os.getppid() != launcher_pid:
        return  # the launcher died while we started
    guard = Guard(channel, launcher_pid, float(sys.argv[3]))
    try:
        guard.run()
    except BaseException:
        guard.close()
        guard.run()
        raise


if __name__ == "__main__":
    main()
