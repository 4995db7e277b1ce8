"""The duties of process 1, where the launcher is a container's entry: pass signals on, reap whatever ends.

The launcher itself then is process 1's only child of its own. Without that, what others leave behind in the
container (`kubectl exec`, a plane's child) would stay in the table of processes as a zombie for good.
"""

from __future__ import annotations

import os
import signal
import sys

# What the kernel sends to process 1 for its own affairs, and what a terminal does with its groups.
_NOT_PASSED_ON = {signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP, signal.SIGCONT}


def take_duty() -> None:
    """As process 1: fork, return in the child alone, and end as it ends. Returns at once as any other."""
    if os.getpid() != 1:
        return
    everything = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    child = os.fork()
    if child == 0:
        _lead_the_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        signum = signal.sigwaitinfo(everything).si_signo
        if signum not in _NOT_PASSED_ON:
            os.kill(child, signum)
        code = _reap(child)
        if code is not None:
            # Not sys.exit: what a caller would still do at its end is the child's business.
            os._exit(code)


def _reap(child: int) -> int | None:
    """Reap all that have ended; the child's exit code as a shell would say it, None while it lives."""
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


def _lead_the_terminal() -> None:
    """A group of our own in the foreground: else Ctrl-C would come twice, from the terminal and passed on."""
    os.setpgid(0, 0)
    if sys.stdin is not None and sys.stdin.isatty():
        os.tcsetpgrp(sys.stdin.fileno(), os.getpid())
