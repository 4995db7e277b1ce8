"""Runs each check in a child process of its own: it may hang, crash or be unkillable without harm to others.

A check is a function that returns an `Outcome`. It runs in a forked child (a fork costs a millisecond, a new
interpreter fifty) in a session of its own. The parent waits for results, for exits (pidfd) and for deadlines,
and turns what happens into `CheckResult`s: an answer in time is the check's own; an overrun is the finding
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
OnStep = Callable[[str], None]

# A killed process is gone in milliseconds, or else it waits in the kernel, where no signal reaches it.
KILL_WAIT_S = 1.0
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 65536

# The scope of an overrun (scopes of `CheckResult`), which the check itself can't give.
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
    """What a check returns: `result` is a line for people, `finding` and `scope` are empty when it passed."""

    passed: bool
    result: str
    finding: str = ""
    scope: str = ""
    details: dict[str, Scalar] = {}


def passed(result: str, details: dict[str, Scalar] | None = None) -> Outcome:
    """An outcome without a finding."""
    return Outcome(True, result, details=details or {})


def failed(finding: str, scope: str, result: str, details: dict[str, Scalar] | None = None) -> Outcome:
    """An outcome with the finding's code and its scope."""
    return Outcome(False, result, finding, scope, details or {})


class Channel:
    """The child's end of the pipe to its parent: messages of one line each."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def step(self, text: str) -> None:
        """Say what is being done now; the last step is named in the result of an overrun or a crash."""
        self._send(b"N", msgspec.json.encode(text))

    def result(self, result: CheckResult) -> None:
        """Hand over one result."""
        self._send(b"R", msgspec.json.encode(result))

    def extend(self, budget_s: float) -> None:
        """Set the deadline `budget_s` seconds from now, for a task that runs several checks in turn."""
        self._send(b"B", msgspec.json.encode(budget_s))

    def _send(self, kind: bytes, payload: bytes) -> None:
        data = kind + payload + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


class Task(NamedTuple):
    """A function for a child process, its budget in seconds, and the checks whose results it must give."""

    run: Callable[[Channel], None]
    budget_s: float
    expected: tuple[str, ...]


def task(name: str, check: Callable[[OnStep], Outcome], budget_s: float) -> Task:
    """The task that runs one check: `check` gets a function for its steps and returns its outcome."""

    def run(channel: Channel) -> None:
        started = time.monotonic()
        outcome = check(channel.step)
        channel.result(_result(name, outcome, time.monotonic() - started))

    return Task(run, budget_s, (name,))


def run(tasks: Sequence[Task]) -> Iterator[CheckResult]:
    """Run all tasks side by side and yield each result as it comes, every one exactly once.

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
            yield from _results(selector, children)
        finally:
            for child in children:
                child.discard()


def _results(selector: selectors.BaseSelector, children: list[_Child]) -> Iterator[CheckResult]:
    """Wait for results, exits and deadlines until no child is left."""
    while children:
        wait_s = min(child.deadline for child in children) - time.monotonic()
        for key, _ in selector.select(max(0.0, wait_s)):
            child: _Child = key.data
            if key.fd == child.pipe:
                if not child.read():
                    selector.unregister(child.pipe)
            elif child in children:
                child.finish()
                _remove(selector, children, child)
            yield from child.take_results()
        now = time.monotonic()
        for child in [each for each in children if each.deadline <= now]:
            if not child.killed:
                child.kill()
            else:
                child.report_overrun(unkillable=True)
                _remove(selector, children, child)
                yield from child.take_results()


def _remove(selector: selectors.BaseSelector, children: list[_Child], child: _Child) -> None:
    for fd in (child.pipe, child.pidfd):
        if fd in selector.get_map():
            selector.unregister(fd)
    children.remove(child)
    child.close()


class _Child:
    """The parent's side of a task that was started."""

    def __init__(self, each: Task) -> None:
        self._missing = list(each.expected)
        self._budget_s = each.budget_s
        self._buffer = b""
        self._step = ""
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
        """Read what has been written so far; False at the end of the pipe."""
        while True:
            try:
                data = os.read(self.pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._handle_line(line[:1], line[1:])

    def _handle_line(self, kind: bytes, payload: bytes) -> None:
        if kind == b"N":
            self._step = msgspec.json.decode(payload, type=str)
        elif kind == b"B":
            self._budget_s = msgspec.json.decode(payload, type=float)
            if not self.killed:
                self.deadline = time.monotonic() + self._budget_s
        else:
            result = msgspec.json.decode(payload, type=CheckResult)
            if result.check_type in self._missing:
                self._missing.remove(result.check_type)
                self._ready.append(result)

    def take_results(self) -> list[CheckResult]:
        """The results that have not been taken yet."""
        ready, self._ready = self._ready, []
        return ready

    def kill(self) -> None:
        """Kill the child and its process group; its new deadline is when it must be gone."""
        self.killed = True
        self.deadline = time.monotonic() + KILL_WAIT_S
        self._signal_group()

    def _signal_group(self) -> None:
        # Not reaped yet, so neither the pid nor the group id can have been reused.
        for send in (os.killpg, os.kill):  # the group doesn't exist before the child's setsid
            try:
                send(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return

    def finish(self) -> None:
        """The child has ended: read the rest, kill its process group, reap it, report results that are
        missing.
        """
        self.read()
        self._signal_group()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if self.killed:
            self.report_overrun(unkillable=False)
        elif self._missing:
            self._report_crash(os.waitstatus_to_exitcode(status))

    def report_overrun(self, unkillable: bool) -> None:
        """Every missing result becomes "<check>.timeout"."""
        tail = f" (it was {self._step})" if self._step else ""
        if unkillable:
            tail += f"; it can't be killed, it waits in the kernel: pid {self.pid} is left behind"
        for name in self._missing:
            scope = _TIMEOUT_SCOPE.get(name, "unknown")
            self._add_failure(name, "timeout", scope, f"no answer in {self._budget_s:g} s{tail}")
        self._missing.clear()

    def _report_crash(self, code: int) -> None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        tail = f" while it was {self._step}" if self._step else ""
        for name in self._missing:
            self._add_failure(name, "crashed", "software", f"the check itself crashed{tail} ({how})")
        self._missing.clear()

    def _add_failure(self, name: str, code: str, scope: str, text: str) -> None:
        outcome = failed(f"{name}.{code}", scope, f"{name}: {text}")
        self._ready.append(_result(name, outcome, time.monotonic() - self._started))

    def discard(self) -> None:
        """Kill without results, for a caller that wants no more. Nothing if it has ended."""
        if self.pipe < 0:
            return
        self._signal_group()
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            if selector.select(KILL_WAIT_S):
                os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        """Close the descriptors."""
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
    """Runs the task in the child; never returns, and never runs the parent's exit handlers."""
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # output of libraries must not mix with the parent's results
        channel = Channel(writer)
        try:
            each.run(channel)
            code = 0
        except Exception as error:  # noqa: BLE001  # reported as the finding: a child has no caller
            traceback.print_exc()
            _report_exception(each, channel, error)
            code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _report_exception(each: Task, channel: Channel, error: Exception) -> None:
    """An unexpected exception is a defect of ours or of a library, and says nothing of the node."""
    for name in each.expected:
        text = f"{name}: the check itself failed: {type(error).__name__}: {error}"
        channel.result(_result(name, failed(f"{name}.crashed", "software", text), 0.0))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if `parent` is gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot ask for a parent-death signal")
    if os.getppid() != parent:
        os._exit(1)
