"""The duties of process 1, where the launcher is a container's entry: pass signals on, reap children.

The launcher itself then is a child of process 1. Without that, orphans in the container (of `kubectl exec`,
of a plane) would stay zombies until the container ends.
"""

from __future__ import annotations

import os
import signal
import sys

# Signals that the kernel or a terminal sends to process 1 itself (child ended, job control).
_NOT_PASSED_ON = {signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP, signal.SIGCONT}


def serve_as_init() -> None:
    """If this is process 1: fork and return only in the child; the parent serves as init and exits as the
    child does. Returns at once in any other process.
    """
    if os.getpid() != 1:
        return
    everything = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    child = os.fork()
    if child == 0:
        _take_foreground()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        signum = signal.sigwaitinfo(everything).si_signo
        if signum not in _NOT_PASSED_ON:
            os.kill(child, signum)
        code = _reap(child)
        if code is not None:
            # Not sys.exit: cleaning up at exit is the child's business.
            os._exit(code)


def _reap(child: int) -> int | None:
    """Reap all that have ended; the child's exit code (128 + N for a signal), None while it lives."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def _take_foreground() -> None:
    """Make our process group the foreground one: else Ctrl-C would arrive twice, the second one passed on."""
    os.setpgid(0, 0)
    if sys.stdin is not None and sys.stdin.isatty():
        os.tcsetpgrp(sys.stdin.fileno(), os.getpid())
