"""Whether a process can handle the signal that it got. Part of the guard program, stdlib only.

A Python signal handler runs when the main thread returns from the C call that it is in. A rank that waits for
a collective that will never end (NCCL, a lock in C) never returns: the kernel resumes the wait after the
signal, and the handler never runs. A grace period for such a rank only delays the recovery.
"""

from __future__ import annotations

import os

# CPU time of all threads together, up to which a process counts as having done nothing about a signal.
IDLE_NS_MAX = 2_000_000
WORKING = (b"R", b"D")


def wait_state(pid: int) -> tuple[bytes, int] | None:
    """The system call in which the main thread waits (number, arguments, stack and instruction pointer), and
    the CPU time of all threads, in ns. None if it doesn't wait in the kernel, or can't be read.
    """
    try:
        with open(f"/proc/{pid}/syscall", "rb", buffering=0) as file:
            wait = file.read(4096)
        used_ns = 0
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb", buffering=0) as file:
                used_ns += int(file.read(256).split()[0])
    except (OSError, ValueError, IndexError):
        return None  # it has ended, isn't ours to look into, or the kernel keeps no such figures
    return None if wait.startswith((b"running", b"-1")) else (wait, used_ns)


def still_blocked(pid: int, before: tuple[bytes, int] | None) -> bool:
    """Whether the process still waits in the call in which it waited ``before`` the signal, and nothing else
    in it runs. ``before``: its ``wait_state`` then.
    """
    now = wait_state(pid) if before is not None else None
    if before is None or now is None or now[0] != before[0] or now[1] - before[1] > IDLE_NS_MAX:
        return False
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb", buffering=0) as file:
                if file.read(4096).rpartition(b")")[2].split(None, 1)[0] in WORKING:
                    return False
    except (OSError, IndexError):
        return False
    return True
