"""What a killed guard leaves behind: the helper processes of its ranks, ended by the launcher in its place.

The kernel kills the ranks when their guard is killed, but not what they have started (a helper in a session
of its own lives on). Those are handed to the nearest sub-reaper above: the launcher, when it is one too.
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
    """Let whatever a guard of ours leaves behind become a child of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end(wait_s: float = 5.0) -> list[int]:
    """Kill all descendants of this process but our own programs; returns those that survive `wait_s`."""
    until_s = time.monotonic() + wait_s
    while left := _strays():
        # A pidfd each, taken before the kill: a child that we have reaped may have had its number since.
        watched = [(pid, fd) for pid in left if (fd := _open(pid)) >= 0]
        for pid, fd in watched:
            send_signal(pid, signal.SIGKILL)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(until_s - time.monotonic(), 0.0) * 1000)
            os.close(fd)
            _reap(pid)
        if time.monotonic() >= until_s:
            return _strays()
    return []


def _strays() -> list[int]:
    me = os.getpid()
    ours = frozenset(pid for pid in descendants(me) if _is_ours(pid))
    return [pid for pid, state in descendants(me, ours).items() if state != "Z"]


def _is_ours(pid: int) -> bool:
    """Whether this is a guard, or one of our modules run by `python -m`: plane, master, checks. Checks that
    were forked say that they are in their title, which is one word.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    if b" -m " in words[0] and not any(words[1:]):
        words = words[0].split(b" ")
    run_as_module = b"-m" in words[:4] and any(word.startswith(_OUR_MODULES) for word in words[:5])
    return run_as_module or os.fsencode(GUARD_PROGRAM) in words


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # A grandchild: whoever its parent is now reaps it, we at the latest in the next round.
