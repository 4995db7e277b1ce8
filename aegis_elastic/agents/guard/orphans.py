"""Orphans of a killed guard: the helper processes of its ranks, which the launcher kills in its place.

The kernel kills the ranks when their guard is killed, but not their children (a helper in a session of its
own lives on). Those become children of the nearest sub-reaper above: the launcher, once `adopt` was called.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from aegis_elastic.agents.guard.client import GUARD_PROGRAM
from aegis_elastic.agents.guard.processes import PR_SET_CHILD_SUBREAPER, descendants, prctl, send_signal

_OUR_MODULES = b"aegis_elastic."


def adopt() -> None:
    """Make this process a sub-reaper, so that orphans of a guard become its children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill(wait_s: float = 5.0) -> list[int]:
    """Kill all descendants of this process but our own programs; returns the pids that survive `wait_s`."""
    until_s = time.monotonic() + wait_s
    while left := _orphans():
        # A pidfd each, opened before the kill: after we have reaped a child, its pid may be another
        # process's.
        watched = [(pid, fd) for pid in left if (fd := _open_pidfd(pid)) >= 0]
        for pid, fd in watched:
            send_signal(pid, signal.SIGKILL)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(until_s - time.monotonic(), 0.0) * 1000)
            os.close(fd)
            _reap(pid)
        if time.monotonic() >= until_s:
            return _orphans()
    return []


def _orphans() -> list[int]:
    me = os.getpid()
    ours = frozenset(pid for pid in descendants(me) if _is_ours(pid))
    return [pid for pid, state in descendants(me, ours).items() if state != "Z"]


def _is_ours(pid: int) -> bool:
    """Whether this is a guard, or one of our modules run by `python -m`: plane, master, checks. Forked checks
    have that command as their title, which is a single argument.
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    if b" -m " in arguments[0] and not any(arguments[1:]):
        arguments = arguments[0].split(b" ")
    run_as_module = b"-m" in arguments[:4] and any(
        argument.startswith(_OUR_MODULES) for argument in arguments[:5]
    )
    return run_as_module or os.fsencode(GUARD_PROGRAM) in arguments


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # A grandchild: its present parent reaps it, or we do in the next round.
