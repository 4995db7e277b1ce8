"""Whether a process that was told to stop can have heard of it. Part of the guard program, stdlib only.

A handler of Python's runs when the main thread is back from whatever it calls. A rank that waits for a
collective that will never end (NCCL, a lock in C) comes back from nothing: the kernel takes the wait up again
after the signal, and the handler never runs. To give it time to react is to wait in vain, in every recovery.
"""

from __future__ import annotations

import os

# What a process may use, all threads together, and still have done nothing about a signal.
IDLE_NS_MAX = 2_000_000
WORKING = (b"R", b"D")


def standing(pid: int) -> tuple[bytes, int] | None:
    """Where the main thread waits (system call, arguments, stack, instruction), and what processor time all
    threads have used, in ns. None if it doesn't wait in the kernel, or can't be seen.
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


def cannot_hear(pid: int, before: tuple[bytes, int] | None) -> bool:
    """Whether the process waits in the very call in which it waited ``before`` the signal, and does nothing
    besides.
    """
    now = standing(pid) if before is not None else None
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
