"""One check, one child process: it may hang, crash or be unkillable, and nobody else notices.

A check is a function that returns an `Outcome`. It runs in a forked child (a fork costs a millisecond, a new
interpreter fifty) in a session of its own. The parent waits for results, for exits (pidfd) and for deadlines,
and turns what it sees into `CheckResult`s: an answer in time is the check's own; an overrun is the finding
"<check>.timeout" and the end of the check's process group; an exit without an answer is "<check>.crashed". A
child that survives SIGKILL (it waits in the kernel, D state) is left behind and reported, never waited for.

Tasks nest: a task may fork once into a process that imports torch, and run further tasks from there.

The parent must be single-threaded (it forks), and lives no longer than its own parent if it calls
`die_with_parent`; the children of a dead parent die with it.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from aegis_elastic.core.model import CheckResult

Scalar = float | int | str | bool | None
Note = Callable[[str], None]

# A killed process is gone in milliseconds; one that is not waits in the kernel, and no signal reaches it
# there.
KILL_WAIT_S = 1.0
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 65536

# What an overrun points at when the check itself could not say (scopes of `CheckResult`).
_TIMEOUT_SCOPE = {
    "io": "node",
    "gpu": "hardware",
    "rdma": "hardware",
    "runtime": "software",
    "env": "software",
    "health": "network",
    "allreduce_connection": "network",
    "allreduce_performance": "network",
}


class Outcome(msgspec.Struct, frozen=True):
    """What a check says: `result` is a line for people, `finding` and `scope` are empty when it passed."""

    passed: bool
    result: str
    finding: str = ""
    scope: str = ""
    details: dict[str, Scalar] = {}


def passed(result: str, details: dict[str, Scalar] | None = None) -> Outcome:
    """An outcome without a finding."""
    return Outcome(True, result, details=details or {})


def failed(finding: str, scope: str, result: str, details: dict[str, Scalar] | None = None) -> Outcome:
    """An outcome with the code of what was found and whose fault that points at."""
    return Outcome(False, result, finding, scope, details or {})


class Channel:
    """The child's end: what it tells its parent, one line each."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def note(self, text: str) -> None:
        """Say what is being done now; the last note stands in the report of an overrun or a crash."""
        self._send(b"N", msgspec.json.encode(text))

    def result(self, result: CheckResult) -> None:
        """Hand over one result."""
        self._send(b"R", msgspec.json.encode(result))

    def extend(self, budget_s: float) -> None:
        """Ask for `budget_s` seconds from now on, for a task that runs several checks in turn."""
        self._send(b"B", msgspec.json.encode(budget_s))

    def _send(self, kind: bytes, payload: bytes) -> None:
        data = kind + payload + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


class Task(NamedTuple):
    """A function for a child process, its budget in seconds, and the names of the results that it owes."""

    run: Callable[[Channel], None]
    budget_s: float
    owes: tuple[str, ...]


def task(name: str, check: Callable[[Note], Outcome], budget_s: float) -> Task:
    """The task that runs one check: `check` gets a function for notes and returns its outcome."""

    def run(channel: Channel) -> None:
        started = time.monotonic()
        outcome = check(channel.note)
        channel.result(_result(name, outcome, time.monotonic() - started))

    return Task(run, budget_s, (name,))


def run(tasks: Sequence[Task]) -> Iterator[CheckResult]:
    """Run all tasks side by side and yield each result as it comes; every owed result comes exactly once.

    Closing the iterator early kills what still runs.
    """
    children: list[_Child] = []
    with selectors.DefaultSelector() as selector:
        try:
            for each in tasks:
                child = _Child(each)
                children.append(child)
                selector.register(child.pipe, selectors.EVENT_READ, child)
                selector.register(child.pidfd, selectors.EVENT_READ, child)
            yield from _attend(selector, children)
        finally:
            for child in children:
                child.abandon()


def _attend(selector: selectors.BaseSelector, children: list[_Child]) -> Iterator[CheckResult]:
    """Wait for whatever comes first, until no child is left."""
    while children:
        wait_s = min(child.deadline for child in children) - time.monotonic()
        for key, _ in selector.select(max(0.0, wait_s)):
            child: _Child = key.data
            if key.fd == child.pipe:
                if not child.read():
                    selector.unregister(child.pipe)
            elif child in children:
                child.finish()
                _forget(selector, children, child)
            yield from child.take()
        now = time.monotonic()
        for child in [each for each in children if each.deadline <= now]:
            if not child.killed:
                child.kill()
            else:
                child.report_overrun(unkillable=True)
                _forget(selector, children, child)
                yield from child.take()


def _forget(selector: selectors.BaseSelector, children: list[_Child], child: _Child) -> None:
    for fd in (child.pipe, child.pidfd):
        if fd in selector.get_map():
            selector.unregister(fd)
    children.remove(child)
    child.close()


class _Child:
    """A started task as its parent sees it."""

    def __init__(self, each: Task) -> None:
        self._owes = list(each.owes)
        self._budget_s = each.budget_s
        self._buffer = b""
        self._note = ""
        self._ready: list[CheckResult] = []
        self.killed = False
        self.pipe, writer = os.pipe()
        self._started = time.monotonic()
        self.deadline = self._started + each.budget_s
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _child_main(each, writer, parent)
        os.close(writer)
        os.set_blocking(self.pipe, False)
        self.pidfd = os.pidfd_open(self.pid)

    def read(self) -> bool:
        """Take what has been written so far; False at the end of the pipe."""
        while True:
            try:
                data = os.read(self.pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._hear(line[:1], line[1:])

    def _hear(self, kind: bytes, payload: bytes) -> None:
        if kind == b"N":
            self._note = msgspec.json.decode(payload, type=str)
        elif kind == b"B":
            self._budget_s = msgspec.json.decode(payload, type=float)
            if not self.killed:
                self.deadline = time.monotonic() + self._budget_s
        else:
            result = msgspec.json.decode(payload, type=CheckResult)
            if result.check_type in self._owes:
                self._owes.remove(result.check_type)
                self._ready.append(result)

    def take(self) -> list[CheckResult]:
        """The results that have not been taken yet."""
        ready, self._ready = self._ready, []
        return ready

    def kill(self) -> None:
        """End the child and everything in its process group; it has a moment to disappear."""
        self.killed = True
        self.deadline = time.monotonic() + KILL_WAIT_S
        self._signal_group()

    def _signal_group(self) -> None:
        # Not reaped yet, so neither the pid nor the group can have been given to anybody else.
        for send in (os.killpg, os.kill):  # the group doesn't exist before the child's setsid
            try:
                send(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return

    def finish(self) -> None:
        """The child has ended: take its last words, end what it left behind, reap it, report what it owes."""
        self.read()
        self._signal_group()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if self.killed:
            self.report_overrun(unkillable=False)
        elif self._owes:
            self._report_crash(os.waitstatus_to_exitcode(status))

    def report_overrun(self, unkillable: bool) -> None:
        """Every owed result becomes "<check>.timeout"."""
        tail = f" (it was {self._note})" if self._note else ""
        if unkillable:
            tail += f"; it can't be killed, it waits in the kernel: pid {self.pid} is left behind"
        for name in self._owes:
            scope = _TIMEOUT_SCOPE.get(name, "unknown")
            self._owe(name, "timeout", scope, f"no answer in {self._budget_s:g} s{tail}")
        self._owes.clear()

    def _report_crash(self, code: int) -> None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        tail = f" while it was {self._note}" if self._note else ""
        for name in self._owes:
            self._owe(name, "crashed", "software", f"the check itself crashed{tail} ({how})")
        self._owes.clear()

    def _owe(self, name: str, code: str, scope: str, text: str) -> None:
        outcome = failed(f"{name}.{code}", scope, f"{name}: {text}")
        self._ready.append(_result(name, outcome, time.monotonic() - self._started))

    def abandon(self) -> None:
        """Kill without a report, for a caller that wants no more results. Nothing if it has ended."""
        if self.pipe < 0:
            return
        self._signal_group()
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            if selector.select(KILL_WAIT_S):
                os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.pipe)
        os.close(self.pidfd)
        self.pipe = self.pidfd = -1


def _result(name: str, outcome: Outcome, duration_s: float) -> CheckResult:
    return CheckResult(
        check_type=name,
        passed=outcome.passed,
        result=outcome.result,
        time_stamp=time.time(),
        duration_s=round(duration_s, 6),
        finding=outcome.finding,
        scope=outcome.scope,
        details=outcome.details,
    )


def _child_main(each: Task, writer: int, parent: int) -> None:
    """The child's whole life; never returns, and never runs the parent's exit handlers."""
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # whatever a library prints must not land between the parent's results
        channel = Channel(writer)
        try:
            each.run(channel)
            code = 0
        except Exception as error:  # noqa: BLE001  # reported as the finding; a child has no caller
            traceback.print_exc()
            _confess(each, channel, error)
            code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _confess(each: Task, channel: Channel, error: Exception) -> None:
    """An exception that no check expected is a defect of ours or of a library, not a verdict on the node."""
    for name in each.owes:
        text = f"{name}: the check itself failed: {type(error).__name__}: {error}"
        channel.result(_result(name, failed(f"{name}.crashed", "software", text), 0.0))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if `parent` is gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot ask for a parent-death signal")
    if os.getppid() != parent:
        os._exit(1)
